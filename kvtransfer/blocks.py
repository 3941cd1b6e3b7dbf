"""Whole blocks on a GPU: copied between pools, staging buffers and a peer's memory, and digested on the way.

The work runs on streams beside the engine's. A block's bytes must be final: whoever calls has seen the result of the pass that
wrote them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch

from kvtransfer.cuda_driver import launch_graph, use_device

HOLD_S = 0.0005  # longest time for which a wait may hold up an event loop
NAP_S = 0.00015  # a nap ends so long before the expected end: waking up takes some of it
SPIN_S = 0.005  # as long as an ordinary push takes: a wait looks at every turn of the loop, then every millisecond
MOST_BLOCKS = 4096  # of one launch; more are moved in several

Result = TypeVar("Result")


class Move:
    """One way of moving blocks, prepared: from one address to another, again and again, each time by a single launch.

    `source` and `target` are addresses of blocks; with `source_ids` or `target_ids` the blocks of a move are named by their
    place there, else they lie one behind the other. `target` None: only digested. For one thread at a time, and one move at a
    time: nothing but `is_done` and what waits for it may be called between `start` and its end.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        *,
        source: int,
        target: int | None,
        block_bytes: int,
        source_ids: bool,
        target_ids: bool,
        digest: bool,
    ) -> None:
        self._device, self._stream = device, stream
        pinned = stream is not None
        self._request, self._answer = (
            torch.zeros(1 + MOST_BLOCKS, dtype=torch.int64, pin_memory=pinned) for _ in range(2)
        )
        self._head = self._request.numpy()
        self._ids = self._head[1:].view(np.int32).reshape(-1, 2)  # source and target of each block
        self._landed = self._answer.numpy()
        self._sign = self._landed.data
        self._digests = torch.zeros(MOST_BLOCKS, dtype=torch.int64, device=device)
        self._finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._sequence = self._count = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._thread = 0  # the last that launched
        self._way = (source, target)
        self._block_lanes = block_bytes // 4
        self._kind = {"source_ids": source_ids, "target_ids": target_ids, "digest": digest}
        if stream is not None:
            self._capture()

    def _capture(self) -> None:
        """Compile the kernel, then capture its launch: a graph is launched in a fraction of the time."""
        assert self._stream is not None
        torch.cuda.synchronize(self._device)  # the zeros are there before another stream writes
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._enqueue()  # of no blocks
            self._stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue()
            finally:
                self._graph.capture_end()

    def _enqueue(self) -> None:
        move_blocks(
            self._request,
            *self._way,
            self._digests,
            self._finished,
            self._answer,
            block_lanes=self._block_lanes,
            **self._kind,
        )

    def start(self, source_blocks: Sequence[int] | None, target_blocks: Sequence[int] | None) -> None:
        """Move blocks, `MOST_BLOCKS` at most, without waiting. None: what lies one behind the other."""
        for column, blocks in enumerate((source_blocks, target_blocks)):
            if blocks is not None:
                self._count = len(blocks)
                self._ids[: self._count, column] = blocks
        self._sequence = self._sequence % (2**31 - 1) + 1
        self._head[0] = self._sequence << 32 | self._count
        if self._stream is not None and self._thread != threading.get_ident():
            use_device(self._device.index or 0)
            self._thread = threading.get_ident()
        if self._stream is None or self._graph is None:
            self._enqueue()
        elif hasattr(self._graph, "raw_cuda_graph_exec"):
            launch_graph(self._graph.raw_cuda_graph_exec(), self._stream.cuda_stream)
        else:  # torch before 2.11
            with torch.cuda.stream(self._stream):
                self._graph.replay()

    def is_done(self) -> bool:
        """Whether the last move is in place."""
        return bool(self._sign[0] == self._sequence)

    def digests(self) -> bytes:
        """The digests of the last move, once it is done; packed little-endian u64."""
        return self._landed[1 : 1 + self._count].tobytes()

    def wait(self) -> None:
        """Block this thread, without holding up others, until the move is in place. Raises RuntimeError: the device's error."""
        if self._stream is not None:
            self._stream.synchronize()

    def soon(self, expected_s: float) -> bool:
        """Whether the move ends within `HOLD_S`, for which this thread is held: it naps first, then looks all the time.

        An event loop's turn, or a thread's waking up, takes as long as moving many blocks. Does nothing for a move that takes
        longer by all expectation.
        """
        if expected_s > HOLD_S:
            return self.is_done()
        give_up_at = time.perf_counter() + HOLD_S
        if expected_s > 2 * NAP_S:
            time.sleep(expected_s - NAP_S)  # other threads run meanwhile
        while not self.is_done():
            if time.perf_counter() > give_up_at:
                return False
        return True

    async def done(self) -> None:
        """Wait until the move is in place. Cancelling does not stop it: wait again. Raises RuntimeError: the device's error.

        Looks again and again for as long as an ordinary push takes: a thread's waking up would take longer than many a push.
        """
        give_up_at = time.perf_counter() + SPIN_S
        while not self.is_done():
            spin = time.perf_counter() < give_up_at
            if not spin and self._stream is not None:
                self._stream.query()  # raises if the device failed
            await asyncio.sleep(0 if spin else 0.001)


class BlockMover:
    """Moves blocks of `pool` [num_blocks, ...], any 2- or 4-byte dtype, on a stream of its own.

    Its methods are safe for concurrent use by threads, which they block until the bytes are in place. A move of its own
    (`move_to`, `gather`, `scatter`) is for whoever asked for it.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self.block_bytes, self.num_blocks = pool[0].nbytes, len(pool)
        self._pool = pool
        self._turn = threading.Lock()
        self._stream = torch.cuda.Stream(pool.device, priority=-1) if pool.is_cuda else None  # short, and waited for
        self._digesting: Move | None = None

    def move_to(self, target: int) -> Move:
        """From the pool to one of the same layout at address `target`."""
        return self._move(self._pool.data_ptr(), target, source_ids=True, target_ids=True, digest=True)

    def gather(self, staging: int) -> Move:
        """From the pool, packed, to address `staging` of this device."""
        return self._move(self._pool.data_ptr(), staging, source_ids=True, target_ids=False, digest=True)

    def scatter(self, staging: int) -> Move:
        """From where blocks lie packed, at address `staging` of this device, into the pool."""
        return self._move(staging, self._pool.data_ptr(), source_ids=False, target_ids=True, digest=False)

    def digests(self, blocks: Sequence[int]) -> bytes:
        """The digests of what lies in `blocks` now, packed little-endian u64."""
        parts = []
        with self._turn:
            if self._digesting is None:
                self._digesting = self._move(
                    self._pool.data_ptr(), None, source_ids=True, target_ids=False, digest=True
                )
            for start in range(0, len(blocks), MOST_BLOCKS):
                self.on_device(partial(self._digesting.start, blocks[start : start + MOST_BLOCKS], None))
                self._digesting.wait()
                parts.append(self._digesting.digests())
        return b"".join(parts)

    def on_device(self, work: Callable[[], Result]) -> Result:
        """Run `work` in this thread with the pool's device as the current one."""
        if self._stream is not None:
            torch.cuda.set_device(self._pool.device)
        return work()

    def _move(self, source: int, target: int | None, *, source_ids: bool, target_ids: bool, digest: bool) -> Move:
        return Move(
            self._pool.device,
            self._stream,
            source=source,
            target=target,
            block_bytes=self.block_bytes,
            source_ids=source_ids,
            target_ids=target_ids,
            digest=digest,
        )


@lru_cache(maxsize=8)
def mover_of(pool: torch.Tensor) -> BlockMover:
    """A mover of the pool that all threads share (by identity of the tensor)."""
    return BlockMover(pool)


def move_blocks(
    request: torch.Tensor,
    source: int,
    target: int | None,
    digests: torch.Tensor,
    finished: torch.Tensor,
    answer: torch.Tensor,
    *,
    source_ids: bool,
    target_ids: bool,
    digest: bool,
    block_lanes: int,
) -> None:
    """Copy blocks of `block_lanes` 32-bit lanes from address `source` to `target` (None: only digest them).

    `request` [1 + n] int64, in the host's memory and read when the kernel runs: the number of blocks and above it, from bit 32
    on, the move's sequence; then for each block its source and, from bit 32 on, its target in units of a block (used only with
    `source_ids`, `target_ids`). When all is in place `answer` [1 + n] int64, in the host's memory too, holds the sequence and
    behind it, with `digest`, the digests (bits of a u64, `kvtransfer.digest`). `digests` [n] int64 and `finished` [1] int32 are
    the device's own, zero before and after.
    """
    from kvtransfer import triton_blocks

    triton_blocks.move_blocks(
        request,
        source,
        target,
        digests,
        finished,
        answer,
        source_ids=source_ids,
        target_ids=target_ids,
        digest=digest,
        block_lanes=block_lanes,
    )
