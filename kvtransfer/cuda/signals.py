"""Words in pinned memory of the host that a GPU's streams wait for and write: they order streams of several processes.

A stream that waits takes nothing of the device, and no host takes part.
"""

from __future__ import annotations

import threading
import weakref

import torch

from kvtransfer.cuda.driver import CudaDriverError, pin, unpin, use_device, wait_for_word, write_word


class StreamSignals:
    """The words of one memory, which other processes map, too. See `engine.parallel.device_ring.Signals`."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        """Pin `memory`, bytes of the host that begin with a page, as long as this lives. Raises MemoryError."""
        torch.cuda.init()
        use_device(device.index or 0)
        try:
            self._address = pin(memory.data_ptr(), memory.nbytes)
        except CudaDriverError as error:
            raise MemoryError(
                f"{memory.nbytes >> 20} MiB between stages can't be pinned: raise the limit on locked memory ({error})"
            ) from error
        self._memory, self._device = memory, device
        weakref.finalize(self, _unpinned, memory.data_ptr(), device.index or 0).atexit = False
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


def _unpinned(address: int, device: int) -> None:
    use_device(device)
    unpin(address)
