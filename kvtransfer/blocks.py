"""Whole blocks on a GPU: copied between pools, staging buffers and a peer's memory, and digested on the way.

All work of a process runs on one stream beside the engine's, from whichever thread calls. A block's bytes must be final: whoever
calls has seen the result of the pass that wrote them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


class BlockMover:
    """Moves blocks of `pool` [num_blocks, ...], any 2- or 4-byte dtype. Safe for concurrent use; calls block their thread."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.block_bytes, self.num_blocks = pool[0].nbytes, len(pool)
        self._pool = pool
        self._turn = threading.Lock()
        self._stream = torch.cuda.Stream(pool.device, priority=-1) if pool.is_cuda else None  # short, and waited for

    def push(self, source_blocks: Sequence[int], target: int, target_blocks: Sequence[int]) -> bytes:
        """Copy blocks to a pool of the same layout at address `target`; return their digests, packed little-endian u64."""
        return self._move(source_blocks, target, target_blocks)

    def digests(self, blocks: Sequence[int]) -> bytes:
        """The digests of what lies in `blocks` now."""
        return self._move(blocks, None, None)

    def gather(self, blocks: Sequence[int], staging: torch.Tensor) -> bytes:
        """Pack blocks into `staging` (bytes of this device); return their digests."""
        return self._move(blocks, staging.data_ptr(), None)

    def scatter(self, staging: torch.Tensor, blocks: Sequence[int]) -> None:
        """Write the blocks that lie packed in `staging` into the pool."""
        with self._running():
            ids = self._ids(blocks)
            move_blocks(
                staging.data_ptr(),
                self._pool.data_ptr(),
                None,
                ids,
                None,
                count=len(blocks),
                block_lanes=self.block_bytes // 4,
            )

    def on_device(self, work: Callable[[], Result]) -> Result:
        """Run `work` in this thread with the pool's device as the current one."""
        with self._running():
            return work()

    def _move(self, blocks: Sequence[int], target: int | None, target_blocks: Sequence[int] | None) -> bytes:
        with self._running():
            digests = torch.zeros(len(blocks), dtype=torch.int64, device=self._pool.device)
            move_blocks(
                self._pool.data_ptr(),
                target,
                self._ids(blocks),
                None if target_blocks is None else self._ids(target_blocks),
                digests,
                count=len(blocks),
                block_lanes=self.block_bytes // 4,
            )
            return digests.cpu().numpy().tobytes()  # waits for this stream alone

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(blocks, dtype=torch.int32)
        return ids.pin_memory().to(self._pool.device, non_blocking=True) if self._pool.is_cuda else ids

    def _running(self) -> _Running:
        return _Running(self._turn, self._stream)


class _Running:
    """The mover's turn, on its stream; left when the work is done."""

    def __init__(self, turn: threading.Lock, stream: torch.cuda.Stream | None) -> None:
        self._turn, self._stream = turn, stream
        self._current: torch.cuda.StreamContext | None = None

    def __enter__(self) -> None:
        self._turn.acquire()
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
            self._current = torch.cuda.stream(self._stream)
            self._current.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            if self._current is not None and self._stream is not None:
                self._current.__exit__(None, None, None)
                self._stream.synchronize()
        finally:
            self._turn.release()


@lru_cache(maxsize=8)
def mover_of(pool: torch.Tensor) -> BlockMover:
    """The one mover of a pool (by identity of the tensor)."""
    return BlockMover(pool)


def move_blocks(
    source: int,
    target: int | None,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    digests: torch.Tensor | None,
    *,
    count: int,
    block_lanes: int,
) -> None:
    """Copy `count` blocks of `block_lanes` 32-bit lanes from address `source` to `target` (None: only digest them).

    `source_ids`, `target_ids` [count] int32: places in units of a block; None: one behind the other. `digests` [count] int64,
    zeroed: the digests (bits of a u64, `kvtransfer.digest`) are added to it.
    """
    from kvtransfer import triton_blocks

    triton_blocks.move_blocks(source, target, source_ids, target_ids, digests, count=count, block_lanes=block_lanes)
