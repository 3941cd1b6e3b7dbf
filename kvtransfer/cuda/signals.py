"""Words in pinned memory of the host that a GPU's streams wait for and write: they order streams of several processes.

A stream that waits takes nothing of the device, and no host takes part.
"""

from __future__ import annotations

import threading

import torch

from kvtransfer.cuda.driver import CudaDriverError, address_on_device, use_device, wait_for_word, write_word

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags: for every context, and at an address that kernels have


class StreamSignals:
    """The words of one memory, which other processes map, too. See `engine.parallel.device_ring.Signals`."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        """Pin `memory`, bytes of the host that begin with a page, for good. Raises CudaDriverError."""
        torch.cuda.init()
        failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_AND_MAPPED))
        if failed:
            raise CudaDriverError(
                f"{memory.nbytes >> 20} MiB between stages can't be pinned (error {failed}): raise the limit on locked memory"
                " (ulimit -l)"
            )
        use_device(device.index or 0)
        self._memory, self._device, self._address = memory, device, address_on_device(memory.data_ptr())
        self._thread = threading.get_ident()

    def wait(self, word: int, number: int) -> None:
        """See `Signals.wait`. Raises CudaDriverError."""
        wait_for_word(self._stream(), self._address + word, number)

    def write(self, word: int, number: int) -> None:
        """See `Signals.write`. Raises CudaDriverError."""
        write_word(self._stream(), self._address + word, number)

    def _stream(self) -> int:
        """The current stream; the driver's calls need a context in each thread."""
        if self._thread != threading.get_ident():
            use_device(self._device.index or 0)
            self._thread = threading.get_ident()
        return torch.cuda.current_stream(self._device).cuda_stream
