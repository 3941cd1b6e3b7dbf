"""Mapping an allocation of each rank of a host into all other ranks' processes, for kernels that write to peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvtransfer.cuda.driver import HANDLE_BYTES, SharedMemory, close_shared, open_shared, share, use_device

Exchange = Callable[[bytes], Sequence[bytes]]  # gives every rank's bytes, in rank order


class SymmetricMemory:
    """All ranks' allocations, as this process has mapped them: `addresses` in rank order.

    `memory` is ours, and final when others learn of it. Raises CudaDriverError.
    """

    def __init__(self, memory: torch.Tensor, rank: int, exchange: Exchange) -> None:
        self._memory = memory
        self._mapped: list[Callable[[], None]] = []
        torch.cuda.synchronize(memory.device)
        use_device(memory.device.index or 0)
        self.addresses = [
            memory.data_ptr() if source == rank else self._map(_unpacked(theirs))
            for source, theirs in enumerate(exchange(_packed(share(memory.data_ptr()))))
        ]

    def _map(self, shared: SharedMemory) -> int:
        address = open_shared(shared)
        self._mapped.append(partial(close_shared, address, shared))
        return address

    def close(self) -> None:
        """Unmap what others share. No kernel that writes there may run."""
        use_device(self._memory.device.index or 0)
        while self._mapped:
            self._mapped.pop()()


def _packed(memory: SharedMemory) -> bytes:
    return memory.handle + memory.offset.to_bytes(8, "little")


def _unpacked(packed: bytes) -> SharedMemory:
    return SharedMemory(packed[:HANDLE_BYTES], int.from_bytes(packed[HANDLE_BYTES:], "little"))
