"""Whole blocks on a GPU: copied between pools, staging buffers and a peer's memory, and digested on the way.

The work runs on streams beside the engine's. A block's bytes must be final: whoever calls has seen the result of the pass that
wrote them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import torch

SPIN_S = 0.005
BLOCKING_S = 0.0005
MOST_BLOCKS = 4096  # of one launch; more are moved in several

Result = TypeVar("Result")


class BlockMover:
    """Moves blocks of `pool` [num_blocks, ...], any 2- or 4-byte dtype, on a stream of its own.

    Safe for concurrent use by threads, which it blocks until the bytes are in place. `push_soon` is for an event loop that owns a
    mover: it must not be called again, nor anything else, before `done`.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self.block_bytes, self.num_blocks = pool[0].nbytes, len(pool)
        self._pool = pool
        self._turn = threading.Lock()
        self._stream = torch.cuda.Stream(pool.device, priority=-1) if pool.is_cuda else None  # short, and waited for
        words = 4 * MOST_BLOCKS + 4  # digests (64 bit, zeroed), source and target ids, count: one copy to the device
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=pool.is_cuda)
        self._device = torch.zeros(words, dtype=torch.int32, device=pool.device)
        self._digests = self._device[: 2 * MOST_BLOCKS].view(torch.int64)
        self._source_ids, self._target_ids = self._device[2 * MOST_BLOCKS : -4].view(2, -1).unbind(0)
        self._pushes: dict[int, torch.cuda.CUDAGraph | None] = {}  # by target, which is prepared; None: without a GPU
        self._landed = torch.zeros(MOST_BLOCKS, dtype=torch.int64, pin_memory=pool.is_cuda)
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)  # the zeros are there before another stream writes

    def push(self, source_blocks: Sequence[int], target: int, target_blocks: Sequence[int]) -> bytes:
        """Copy blocks to a pool of the same layout at address `target`; return their digests, packed little-endian u64."""
        return self._in_parts(source_blocks, target_blocks, lambda source, to: self._run(source, target, to))

    def digests(self, blocks: Sequence[int]) -> bytes:
        """The digests of what lies in `blocks` now."""
        return self._in_parts(blocks, None, lambda source, _: self._run(source, None, None))

    def gather(self, blocks: Sequence[int], staging: torch.Tensor) -> bytes:
        """Pack blocks, `MOST_BLOCKS` at most, into `staging` (bytes of this device); return their digests."""
        return self._in_parts(blocks, None, lambda source, _: self._run(source, staging.data_ptr(), None))

    def scatter(self, staging: torch.Tensor, blocks: Sequence[int]) -> None:
        """Write the blocks, `MOST_BLOCKS` at most, that lie packed in `staging` into the pool."""
        with self._running():
            self._launch(None, self._pool.data_ptr(), blocks, source=staging.data_ptr(), digest=False)
            self._wait()

    def prepare(self, target: int) -> None:
        """Capture pushing to `target` in a CUDA graph: one launch instead of three. Something must have been pushed before."""
        with self._running():
            self._pushes[target] = None if self._stream is None else self._capture(target)

    def _capture(self, target: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._push_counted(target)
        finally:
            graph.capture_end()
        return graph

    def _push_counted(self, target: int) -> None:
        self._enqueue(target, source_ids=True, target_ids=True, count=self._device[-4:])

    def push_soon(self, source_blocks: Sequence[int], target: int, target_blocks: Sequence[int]) -> Pushing:
        """Start to `push`, of `MOST_BLOCKS` at most, without waiting."""
        with self._running():
            self._launch(source_blocks, target, target_blocks)
        return Pushing(self, len(source_blocks))

    def on_device(self, work: Callable[[], Result]) -> Result:
        """Run `work` in this thread with the pool's device as the current one."""
        with self._running():
            return work()

    def _in_parts(
        self,
        blocks: Sequence[int],
        others: Sequence[int] | None,
        run: Callable[[Sequence[int], Sequence[int] | None], bytes],
    ) -> bytes:
        parts = []
        for start in range(0, len(blocks), MOST_BLOCKS):
            part = slice(start, start + MOST_BLOCKS)
            parts.append(run(blocks[part], None if others is None else others[part]))
        return b"".join(parts)

    def _run(self, blocks: Sequence[int], target: int | None, target_blocks: Sequence[int] | None) -> bytes:
        with self._running():
            self._launch(blocks, target, target_blocks)
            self._wait()
            return self.landed(len(blocks))

    def _launch(
        self,
        blocks: Sequence[int] | None,
        target: int | None,
        target_blocks: Sequence[int] | None,
        *,
        source: int | None = None,
        digest: bool = True,
    ) -> None:
        count = len(blocks if blocks is not None else target_blocks or ())
        words = self._host.numpy()
        ids = words[2 * MOST_BLOCKS : -4].reshape(2, -1)
        for row, values in zip(ids, (blocks, target_blocks), strict=True):
            if values is not None:
                row[:count] = values
        if target is not None and target in self._pushes:
            words[-4] = count
            graph = self._pushes[target]
            graph.replay() if graph is not None else self._push_counted(target)
            return
        self._enqueue(
            target,
            source=source,
            source_ids=blocks is not None,
            target_ids=target_blocks is not None,
            digest=digest,
            count=count,
        )

    def _enqueue(
        self,
        target: int | None,
        *,
        source: int | None = None,
        source_ids: bool,
        target_ids: bool,
        digest: bool = True,
        count: int | torch.Tensor,
    ) -> None:
        """Ids to the device, the kernel, digests back: what the device does for one move."""
        self._device.copy_(self._host, non_blocking=True)
        move_blocks(
            self._pool.data_ptr() if source is None else source,
            target,
            self._source_ids if source_ids else None,
            self._target_ids if target_ids else None,
            self._digests if digest else None,
            count=count,
            block_lanes=self.block_bytes // 4,
        )
        if digest:
            some = count if isinstance(count, int) else MOST_BLOCKS
            self._landed[:some].copy_(self._digests[:some], non_blocking=True)

    def is_done(self) -> bool:
        """Whether everything launched so far is in place."""
        return self._stream is None or self._stream.query()

    def landed(self, count: int) -> bytes:
        """The digests of the last launch, once it is done."""
        return self._landed[:count].numpy().tobytes()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _running(self) -> _Running:
        return _Running(self._turn, self._stream)


class Pushing:
    """A push on its way."""

    def __init__(self, mover: BlockMover, count: int) -> None:
        self._mover, self._count = mover, count

    def soon(self) -> bytes | None:
        """The digests, if the bytes are in place within `BLOCKING_S`: a turn of an event loop takes as long as some blocks."""
        give_up_at = time.monotonic() + BLOCKING_S
        while not self._mover.is_done():
            if time.monotonic() > give_up_at:
                return None
        return self._mover.landed(self._count)

    async def done(self) -> bytes:
        """Wait until the bytes are in place; return their digests. Cancelling does not stop the push: wait again.

        Looks again and again for as long as an ordinary push takes: a thread's waking up would take longer than many a push.
        """
        give_up_at = time.monotonic() + SPIN_S
        while not self._mover.is_done():
            await asyncio.sleep(0 if time.monotonic() < give_up_at else 0.001)
        return self._mover.landed(self._count)


class _Running:
    """The mover's turn, on its stream."""

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
        if self._current is not None:
            self._current.__exit__(None, None, None)
        self._turn.release()


@lru_cache(maxsize=8)
def mover_of(pool: torch.Tensor) -> BlockMover:
    """A mover of the pool that all threads share (by identity of the tensor)."""
    return BlockMover(pool)


def move_blocks(
    source: int,
    target: int | None,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    digests: torch.Tensor | None,
    *,
    count: int | torch.Tensor,
    block_lanes: int,
) -> None:
    """Copy `count` blocks of `block_lanes` 32-bit lanes from address `source` to `target` (None: only digest them).

    `source_ids`, `target_ids` [count] int32: places in units of a block; None: one behind the other. `digests` [count] int64,
    zeroed: the digests (bits of a u64, `kvtransfer.digest`) are added to it. A `count` [1] int32 is read when the kernel runs.
    """
    from kvtransfer import triton_blocks

    triton_blocks.move_blocks(source, target, source_ids, target_ids, digests, count=count, block_lanes=block_lanes)
