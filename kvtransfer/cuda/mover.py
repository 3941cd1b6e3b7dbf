"""Moving whole blocks on a GPU between pools, staging buffers and a peer's memory, digesting them on the way.

The work runs on its own streams, parallel to the engine's. A block's bytes must be final: the caller has seen the result of
the pass that wrote them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from common.pages import LANE_BYTES, KVLayout
from kvtransfer.cuda.driver import launch_graph, use_device
from kvtransfer.plan import is_sharded, lane_indices

HOLD_S = 0.0005  # longest time that a wait may block the event loop
WAKE_UP_S = 0.00015  # a sleeping wait ends this long before the expected end
SPIN_S = 0.005  # an ordinary push is shorter; longer waits poll once a millisecond
MAX_BLOCKS = 4096  # moved by one launch

Result = TypeVar("Result")


class BlockArray(NamedTuple):
    """Blocks at an address, of which a move names some by index; else it takes one after the other."""

    address: int
    by_index: bool


class Flight:
    """Moves of one kind, each a single launch on a stream, with request and answer in host memory.

    Use one thread and one move at a time: between its start and its end only `is_done` and the waits may be called.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        enqueue: Callable[..., None],
        *,
        words: int = MAX_BLOCKS,
    ) -> None:
        """`enqueue(request, digests, finished, answer)` launches the kernel. `words`: a request's most, beside its first."""
        self._device, self._stream = device, stream
        pinned = stream is not None
        self._request, self._answer = (
            torch.zeros(1 + number, dtype=torch.int64, pin_memory=pinned) for number in (words, MAX_BLOCKS)
        )
        self.request = self._request.numpy()
        self._landed = self._answer.numpy()
        self._sign = self._landed.data
        self._digests = torch.zeros(MAX_BLOCKS, dtype=torch.int64, device=device)
        self._finished = torch.zeros(1, dtype=torch.int32, device=device)
        self._sequence = self._count = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._thread = 0  # id of the thread that launched last
        self._enqueue = partial(enqueue, self._request, self._digests, self._finished, self._answer)
        if stream is not None:
            self._capture()

    def _capture(self) -> None:
        """Compile the kernel and capture its launch: launching a graph takes a fraction of the time."""
        stream, turn = _capturing(self._device)
        torch.cuda.synchronize(self._device)  # the zeros must be written before another stream writes
        with turn, torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._enqueue()  # an empty move that triggers compilation
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue()
            finally:
                self._graph.capture_end()

    def launch(self, count: int, *, digests: int) -> None:
        """Start the `count` blocks or pieces that the request names behind its first word; so many digests follow."""
        self._count, self._sequence = digests, self._sequence % (2**31 - 1) + 1
        self.request[0] = self._sequence << 32 | count
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
        """True if the last move is complete."""
        return bool(self._sign[0] == self._sequence)

    def digests(self) -> bytes:
        """Digests of the last completed move, packed little-endian u64."""
        return self._landed[1 : 1 + self._count].tobytes()

    def wait(self) -> None:
        """Block this thread until the move is complete. Raises RuntimeError, the device's error."""
        if self._stream is not None:
            self._stream.synchronize()

    def soon(self, expected_s: float) -> bool:
        """Block this thread for up to `HOLD_S`, unless the move will take longer; return whether it has ended.

        A turn of the event loop, or waking a thread, takes as long as moving many blocks.
        """
        if expected_s > HOLD_S:
            return self.is_done()
        give_up_at = time.perf_counter() + HOLD_S
        if expected_s > 2 * WAKE_UP_S:
            time.sleep(expected_s - WAKE_UP_S)  # other threads run meanwhile
        while not self.is_done():
            if time.perf_counter() > give_up_at:
                return False
        return True

    async def done(self) -> None:
        """Wait until the move is complete. Cancelling does not stop it: wait again. Raises RuntimeError, the device's error.

        Polls at each turn of the loop for as long as an ordinary push takes: waking a thread would take longer.
        """
        give_up_at = time.perf_counter() + SPIN_S
        while not self.is_done():
            spin = time.perf_counter() < give_up_at
            if not spin and self._stream is not None:
                self._stream.query()  # raises if the device failed
            await asyncio.sleep(0 if spin else 0.001)


@lru_cache(maxsize=16)
def _capturing(device: torch.device) -> tuple[torch.cuda.Stream, threading.Lock]:
    """The stream in which moves are captured: one that other moves are launched in meanwhile would capture these, too."""
    return torch.cuda.Stream(device, priority=-1), threading.Lock()


class Move:
    """A move of blocks from one array to another. `target` None: the blocks are only digested."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        *,
        source: BlockArray,
        target: BlockArray | None,
        block_bytes: int,
        digest: bool,
        indices: torch.Tensor | None = None,
    ) -> None:
        from kvtransfer.cuda import triton_blocks

        enqueue = partial(
            triton_blocks.move_blocks,
            source=source.address,
            target=None if target is None else target.address,
            indices=indices,
            source_ids=source.by_index,
            target_ids=target is not None and target.by_index,
            digest=digest,
            block_lanes=block_bytes // LANE_BYTES,
        )
        self.flight = Flight(device, stream, enqueue)
        self._ids = self.flight.request[1:].view(np.int32).reshape(-1, 2)  # source and target of each block

    def start(self, source_blocks: Sequence[int] | None, target_blocks: Sequence[int] | None) -> None:
        """Start moving at most `MAX_BLOCKS` blocks. None: they are contiguous."""
        count = 0
        for column, blocks in enumerate((source_blocks, target_blocks)):
            if blocks is not None:
                count = len(blocks)
                self._ids[:count, column] = blocks
        self.flight.launch(count, digests=count)


class BlockMover:
    """Moves blocks of `pool` [num_blocks, ...], of any dtype, on a stream of its own. `layout` None: all the model's heads.

    `digests` blocks its thread and is safe for concurrent use. A `Move` (`move_to`, `gather`, `scatter`) belongs to its caller.
    """

    def __init__(self, pool: torch.Tensor, layout: KVLayout | None = None) -> None:
        self.block_bytes, self.num_blocks = pool[0].nbytes, len(pool)
        self._indices: torch.Tensor | None = None
        if layout is not None and is_sharded(layout):
            self._indices = torch.from_numpy(lane_indices(layout)).to(pool.device)
        self._pool = pool  # kept while its address is used
        self.device, self.address = pool.device, pool.data_ptr()
        self._blocks = BlockArray(self.address, by_index=True)
        self._turn = threading.Lock()
        self.stream = torch.cuda.Stream(pool.device, priority=-1) if pool.is_cuda else None  # short, and waited for
        self._digesting: Move | None = None

    def move_to(self, target: int) -> Move:
        """Return the move from the pool to one of the same layout at address `target`."""
        return self._move(self._blocks, BlockArray(target, by_index=True), digest=True)

    def gather(self, staging: int) -> Move:
        """Return the move from the pool to packed blocks at address `staging` of this device."""
        return self._move(self._blocks, BlockArray(staging, by_index=False), digest=True)

    def scatter(self, staging: int) -> Move:
        """Return the move from packed blocks at address `staging` of this device into the pool."""
        return self._move(BlockArray(staging, by_index=False), self._blocks, digest=False)

    def digests(self, blocks: Sequence[int]) -> bytes:
        """Return the current digests of `blocks`, packed little-endian u64."""
        parts = []
        with self._turn:
            if self._digesting is None:
                self._digesting = self._move(self._blocks, None, digest=True)
            for start in range(0, len(blocks), MAX_BLOCKS):
                self.on_device(partial(self._digesting.start, blocks[start : start + MAX_BLOCKS], None))
                self._digesting.flight.wait()
                parts.append(self._digesting.flight.digests())
        return b"".join(parts)

    def on_device(self, work: Callable[[], Result]) -> Result:
        """Run `work` in this thread with the pool's device as the current one."""
        if self.stream is not None:
            torch.cuda.set_device(self.device)
        return work()

    def _move(self, source: BlockArray, target: BlockArray | None, *, digest: bool) -> Move:
        return Move(
            self.device,
            self.stream,
            source=source,
            target=target,
            block_bytes=self.block_bytes,
            digest=digest,
            indices=self._indices if digest else None,
        )


@lru_cache(maxsize=8)
def mover_of(pool: torch.Tensor, layout: KVLayout | None = None) -> BlockMover:
    """Return the pool's mover, shared by all threads; a pool is known by the tensor's identity."""
    return BlockMover(pool, layout)
