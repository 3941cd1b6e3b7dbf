"""The staging slots of UCX messages, packed from a pool or unpacked into it.

The pool is in host memory or on a GPU. A slot is one message's buffer. Slots are kept for the next link, because UCX may
still write into one for a moment after its link was broken off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np
import torch

from common.messages import KVLayout
from kvtransfer.cuda.mover import BlockMover, mover_of
from kvtransfer.cuda.shares import PackedLanes, PackedMove
from kvtransfer.digest import Factors, factors_of, lane_digest, lane_view
from kvtransfer.host import gather, packed, scatter
from kvtransfer.plan import Runs
from kvtransfer.shares import Move, Piece
from kvtransfer.ucx.wire import Array, Wire

# Slots at either end of a link: one is packed or unpacked while others are on the wire. 4 slots and 8 pieces were the
# fastest at every size between two H200s over NVLink (benchmarks/results/).
SLOTS = 4
# Minimum pieces of a run: they bound the wait before the first is sent and after the last arrived.
MIN_PIECES = 8
# Kinds of pieces whose moves are kept compiled: a link has one for each group of layers and block of an entry.
MOST_KINDS = 64
# The runs of a piece, and the receiver's layout where they are packed; None where they are unpacked.
Kind = tuple[tuple[Runs, ...], KVLayout | None]


class Slot(Protocol):
    """One message's buffer, packed from a pool or unpacked into it."""

    def array(self, num_bytes: int) -> Array:
        """The first bytes of the slot as an array for UCX."""
        ...

    def pack(self, blocks: Sequence[int]) -> None:
        """Begin to gather blocks."""
        ...

    def pack_share(self, piece: Piece, moves: Sequence[Move], layout: KVLayout) -> None:
        """Begin to gather a piece of a share of each move's blocks, for a receiver of this layout."""
        ...

    async def packed(self, wire: Wire) -> bytes:
        """Wait until the blocks are gathered; return their digests."""
        ...

    def unpack(self, blocks: Sequence[int], runs: Sequence[Runs] = ()) -> None:
        """Start writing `len(blocks)` blocks into the pool, or of each of them these runs."""
        ...

    def unpacked(self, meanwhile: Callable[[], object]) -> None:
        """Wait until the unpacked blocks are in the pool."""
        ...


class PoolMemory(Protocol):
    """A pool as the source or destination of runs of blocks."""

    num_blocks: int
    block_bytes: int
    slot_bytes: int  # whole blocks, at least one
    min_piece_bytes: int  # below this a message's fixed cost dominates
    hold_s: float  # longest time that moving blocks may hold the event loop

    async def slots(self, count: int, num_bytes: int) -> list[Slot]:
        """`count` slots, to be given back with `keep`. Raises MemoryError."""
        ...

    def keep(self, slots: list[Slot], num_bytes: int) -> None: ...

    async def will_pack(self, slots: Sequence[Slot], pieces: Sequence[Piece], layout: KVLayout) -> None:
        """Prepare slots, of which none is packed now, for `pack_share` of these pieces. Raises MemoryError."""
        ...

    async def will_unpack(self, slots: Sequence[Slot], runs: Sequence[Runs]) -> None:
        """Prepare slots, of which none is unpacked now, for `unpack` of such runs. Raises MemoryError."""
        ...


def memory_of(pool: torch.Tensor, layout: KVLayout) -> PoolMemory:
    """Return the memory of the pool's device. Raises ValueError for one that UCX can't reach."""
    if pool.is_cuda:
        return DeviceMemory(pool, layout)
    if pool.device.type != "cpu":
        raise ValueError(f"transport ucx moves host and CUDA memory, not {pool.device}'s")
    return HostMemory(pool, layout)


def piece_blocks(memory: PoolMemory, count: int, slot_bytes: int, block_bytes: int) -> int:
    """Blocks of a run in one message, or shares of blocks."""
    wanted = max(-(-count // MIN_PIECES), memory.min_piece_bytes // block_bytes, 1)
    return min(wanted, slot_bytes // block_bytes)


class _Kept:
    """Free slots, by count and size."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], list[list[Slot]]] = {}

    def take(self, count: int, num_bytes: int) -> list[Slot] | None:
        kept = self._slots.get((count, num_bytes))
        return kept.pop() if kept else None

    def keep(self, slots: list[Slot], num_bytes: int) -> None:
        self._slots.setdefault((len(slots), num_bytes), []).append(slots)


class HostMemory:
    """Host memory, packed by a thread: computing digests takes longer than the wire."""

    min_piece_bytes = 1 << 20
    hold_s = 0.0

    def __init__(self, pool: torch.Tensor, layout: KVLayout) -> None:
        self.lanes = lane_view(pool)
        self.factors = factors_of(layout)
        self.num_blocks, self.block_bytes = len(pool), pool[0].nbytes
        self.slot_bytes = _whole_blocks(4 << 20, self.block_bytes)
        self.packers = ThreadPoolExecutor(1, "baton-ucx-pack")
        self._kept = _Kept()
        self.keep = self._kept.keep

    async def slots(self, count: int, num_bytes: int) -> list[Slot]:
        kept = self._kept.take(count, num_bytes)
        return kept if kept is not None else [HostSlot(self, num_bytes) for _ in range(count)]

    async def will_pack(self, slots: Sequence[Slot], pieces: Sequence[Piece], layout: KVLayout) -> None:
        """No-op: numpy compiles nothing."""

    async def will_unpack(self, slots: Sequence[Slot], runs: Sequence[Runs]) -> None:
        """No-op: numpy compiles nothing."""


class HostSlot:
    """Copies block by block with numpy, so that the digest reads from the CPU's cache."""

    inline_bytes = 64 << 10  # packed inline: faster than waking a thread

    def __init__(self, memory: HostMemory, num_bytes: int) -> None:
        self._memory = memory
        self._bytes = np.zeros(num_bytes, np.uint8)
        whole = num_bytes // memory.block_bytes * memory.block_bytes
        self._packed = self._bytes[:whole].view(np.uint32).reshape(-1, memory.lanes.shape[1])
        self._packing: Future[bytes] | None = None

    def array(self, num_bytes: int) -> Array:
        return Array(self._bytes[:num_bytes])

    def pack(self, blocks: Sequence[int]) -> None:
        self._begin(partial(self._pack, blocks), len(blocks) * self._memory.block_bytes)

    def pack_share(self, piece: Piece, moves: Sequence[Move], layout: KVLayout) -> None:
        self._begin(partial(self._pack_share, piece, moves, factors_of(layout)), len(moves) * piece.num_bytes)

    def _begin(self, pack: Callable[[], bytes], num_bytes: int) -> None:
        if num_bytes > self.inline_bytes:
            self._packing = self._memory.packers.submit(pack)
        else:
            self._packing = Future()
            self._packing.set_result(pack())

    async def packed(self, wire: Wire) -> bytes:
        assert self._packing is not None
        return self._packing.result() if self._packing.done() else await asyncio.wrap_future(self._packing)

    def unpack(self, blocks: Sequence[int], runs: Sequence[Runs] = ()) -> None:
        size = sum(run.count * run.num_bytes for run in runs)
        for index, block in enumerate(blocks):
            if runs:
                share = self._bytes[index * size : (index + 1) * size].view(np.uint32)
                scatter(runs, share, self._memory.lanes[block])
            else:
                self._memory.lanes[block] = self._packed[index]

    def unpacked(self, meanwhile: Callable[[], object]) -> None:
        """No-op: `unpack` is synchronous."""

    def _pack(self, blocks: Sequence[int]) -> bytes:
        digests = np.empty(len(blocks), dtype="<u8")
        for index, block in enumerate(blocks):
            self._packed[index] = self._memory.lanes[block]
            digests[index] = lane_digest(self._packed[index], self._memory.factors)
        return digests.tobytes()

    def _pack_share(self, piece: Piece, moves: Sequence[Move], factors: Factors) -> bytes:
        size, digests = piece.num_bytes, []
        for index, move in enumerate(moves):
            share = self._bytes[index * size : (index + 1) * size].view(np.uint32)
            digests.append(gather(piece, move, self._memory.lanes, share, factors))
        return packed(digests)


class DeviceMemory:
    """Device memory: one launch a piece at either end, overlapped with the wire."""

    min_piece_bytes = 8 << 20  # a run of 32 MiB: 126 GB/s; with 2 MiB 83
    hold_s = 0.0005

    def __init__(self, pool: torch.Tensor, layout: KVLayout) -> None:
        self._pool = pool
        self.mover = BlockMover(pool, layout)
        self.num_blocks, self.block_bytes = self.mover.num_blocks, self.mover.block_bytes
        self.slot_bytes = _whole_blocks(32 << 20, self.block_bytes)
        self._kept = _Kept()
        self.keep = self._kept.keep
        self._lanes: dict[Kind, PackedLanes] = {}  # the same for all slots
        # Compiled before the first handoff waits for it.
        mover_of(pool, layout).digests([0])
        whole = (Runs(source=0, destination=0, num_bytes=self.block_bytes),)
        for kind in ((whole, layout), (whole, None)):
            self.move_of(kind, pool)
        self._lanes.clear()

    def move_of(self, kind: Kind, staging: torch.Tensor) -> PackedMove:
        """Return a new move of pieces of this kind between the pool and a slot's memory."""
        lanes = self._lanes.get(kind)
        if lanes is None:
            lanes = PackedLanes.of(*kind, self._pool.device)
            if len(self._lanes) >= MOST_KINDS:
                self._lanes.clear()
            self._lanes[kind] = lanes
        return PackedMove(self.mover, staging.data_ptr(), lanes)

    async def will_pack(self, slots: Sequence[Slot], pieces: Sequence[Piece], layout: KVLayout) -> None:
        await self._will_move(slots, [(piece.runs, layout) for piece in pieces])

    async def will_unpack(self, slots: Sequence[Slot], runs: Sequence[Runs]) -> None:
        await self._will_move(slots, [(tuple(runs), None)])

    async def _will_move(self, slots: Sequence[Slot], kinds: Sequence[Kind]) -> None:
        """Capture moves in a thread, where they are new."""
        own = [slot for slot in slots if isinstance(slot, DeviceSlot) and not slot.knows(kinds)]
        if not own:
            return

        def learn() -> None:
            for slot in own:
                slot.learn(kinds)

        try:
            await asyncio.to_thread(learn)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no room for the moves of shares: lower --kv-memory-mb ({error})") from error

    async def slots(self, count: int, num_bytes: int) -> list[Slot]:
        kept = self._kept.take(count, num_bytes)
        return kept if kept is not None else await asyncio.to_thread(self._new_slots, count, num_bytes)

    def _new_slots(self, count: int, num_bytes: int) -> list[Slot]:
        try:
            staging = torch.zeros(count, num_bytes, dtype=torch.uint8, device=self._pool.device)
        except torch.OutOfMemoryError as error:
            size = f"{count * num_bytes >> 20} MiB"
            raise MemoryError(f"no room for a link's staging of {size}: lower --kv-memory-mb ({error})") from error
        return [DeviceSlot(self, part) for part in staging]


class DeviceSlot:
    """Both moves of whole blocks prepared, as a slot may serve either end of a link; those of shares by kind."""

    def __init__(self, memory: DeviceMemory, staging: torch.Tensor) -> None:
        self._memory, self._staging, mover = memory, staging, memory.mover
        self._gather, self._scatter = mover.gather(staging.data_ptr()), mover.scatter(staging.data_ptr())
        self._packing, self._unpacking = self._gather.flight, self._scatter.flight
        self._shares: dict[Kind, PackedMove] = {}
        self._arrays = {staging.nbytes: Array(staging)}

    def array(self, num_bytes: int) -> Array:
        if num_bytes not in self._arrays:
            if len(self._arrays) > 64:
                self._arrays.clear()
            self._arrays[num_bytes] = Array(self._staging[:num_bytes])
        return self._arrays[num_bytes]

    def pack(self, blocks: Sequence[int]) -> None:
        self._packing = self._gather.flight
        self._gather.start(blocks, None)

    async def packed(self, wire: Wire) -> bytes:
        await wire.until(self._packing.is_done)
        return self._packing.digests()

    def pack_share(self, piece: Piece, moves: Sequence[Move], layout: KVLayout) -> None:
        move = self._shares[piece.runs, layout]
        self._packing = move.flight
        move.start([each.entry[piece.source] for each in moves])

    def knows(self, kinds: Sequence[Kind]) -> bool:
        """True if all of these are prepared."""
        return self._shares.keys() >= set(kinds)

    def learn(self, kinds: Sequence[Kind]) -> None:
        """Prepare moves of these kinds, while none is in flight."""
        if len(self._shares) + len(kinds) > MOST_KINDS:
            self._shares.clear()
        for kind in kinds:
            if kind not in self._shares:
                self._shares[kind] = self._memory.move_of(kind, self._staging)

    def unpack(self, blocks: Sequence[int], runs: Sequence[Runs] = ()) -> None:
        if runs:
            move = self._shares[tuple(runs), None]
            self._unpacking = move.flight
            move.start(blocks)
        else:
            self._unpacking = self._scatter.flight
            self._scatter.start(None, blocks)

    def unpacked(self, meanwhile: Callable[[], object]) -> None:
        """Poll until the piece is in place (about 20 us); on a much slower device wait without holding the GIL."""
        give_up_at = time.perf_counter() + DeviceMemory.hold_s
        while not self._unpacking.is_done():
            meanwhile()
            if time.perf_counter() > give_up_at:
                self._unpacking.wait()


def _whole_blocks(num_bytes: int, block_bytes: int) -> int:
    return max(num_bytes // block_bytes, 1) * block_bytes
