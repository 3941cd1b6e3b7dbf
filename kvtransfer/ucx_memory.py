"""Where UCX's messages come from and go to: a pool in host memory or on a GPU, packed into staging buffers and unpacked.

n blocks of a pool. A staging buffer is whatever UCX takes: a numpy array here, a tensor on the GPU there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvtransfer.blocks import BlockMover
from kvtransfer.digest import lane_digest, lane_view, multipliers


class PoolMemory(Protocol):
    """A pool as a sender or receiver of runs of blocks."""

    num_blocks: int
    block_bytes: int
    message_bytes: int  # most bytes of one message
    turn_bytes: int  # most bytes that one turn of the event loop unpacks

    def buffer(self, num_bytes: int) -> Any:
        """Memory for `num_bytes` bytes, of any content."""
        ...

    def gather(self, blocks: Sequence[int]) -> tuple[Any, bytes]:
        """Pack blocks into a buffer; return it with the digests of what was packed. Called in a thread."""
        ...

    def scatter(self, buffer: Any, first: int, blocks: Sequence[int]) -> None:
        """Write `len(blocks)` blocks, packed from the `first`th on, into the pool. When it returns they are there."""
        ...


def memory_of(pool: torch.Tensor) -> PoolMemory:
    """The pool's memory by its device. Raises ValueError for one that UCX can't reach."""
    if pool.is_cuda:
        return DeviceMemory(pool)
    if pool.device.type != "cpu":
        raise ValueError(f"transport ucx moves host and CUDA memory, not {pool.device}'s")
    return HostMemory(pool)


class HostMemory:
    """Block by block with numpy, so that the digest reads what the copy brought into the cache."""

    message_bytes = 32 << 20
    turn_bytes = 4 << 20

    def __init__(self, pool: torch.Tensor) -> None:
        self._lanes = lane_view(pool)
        self._factors = multipliers(self._lanes.shape[1])
        self.num_blocks, self.block_bytes = len(pool), pool[0].nbytes

    def buffer(self, num_bytes: int) -> Any:
        return np.empty(num_bytes, np.uint8)

    def gather(self, blocks: Sequence[int]) -> tuple[Any, bytes]:
        staging = np.empty((len(blocks), self._lanes.shape[1]), np.uint32)
        digests = np.empty(len(blocks), dtype="<u8")
        for index, block in enumerate(blocks):
            staging[index] = self._lanes[block]
            digests[index] = lane_digest(staging[index], self._factors)
        return staging.reshape(-1).view(np.uint8), digests.tobytes()

    def scatter(self, buffer: Any, first: int, blocks: Sequence[int]) -> None:
        packed = buffer.view(np.uint32).reshape(-1, self._lanes.shape[1])
        self._lanes[list(blocks)] = packed[first : first + len(blocks)]


class DeviceMemory:
    """One kernel a message each way; few, large messages, since each costs about 90 us (measured between two H200s)."""

    message_bytes = 256 << 20
    turn_bytes = 256 << 20

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._mover = BlockMover(pool)
        self.num_blocks, self.block_bytes = self._mover.num_blocks, self._mover.block_bytes

    def buffer(self, num_bytes: int) -> Any:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._pool.device)
        torch.cuda.current_stream(self._pool.device).synchronize()  # the allocator may still have work on it there
        return buffer

    def gather(self, blocks: Sequence[int]) -> tuple[Any, bytes]:
        staging = self.buffer(len(blocks) * self.block_bytes)
        return staging, self._mover.gather(blocks, staging)

    def scatter(self, buffer: Any, first: int, blocks: Sequence[int]) -> None:
        self._mover.scatter(buffer[first * self.block_bytes :], blocks)
