"""Moving a share of blocks on a GPU into the pool of a rank that keeps other heads or layers, digesting it on the way.

The runs of a share are the same for every entry, so their lanes are listed once, on the device, when a link opens: where each
is in our block and in the peer's, and its place in the whole model's block, which its digest depends on. Where the peer's pool
can't be written, its lanes are packed one after the other, and unpacked there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from common.pages import LANE_BYTES, KVLayout
from kvtransfer.cuda.mover import MAX_BLOCKS, BlockMover, Flight
from kvtransfer.plan import Item, Runs, is_sharded, lane_indices, lanes_at
from kvtransfer.shares import ZEROS, Move, Piece, Share

Column = npt.NDArray[np.int64]
HEAD_WORDS = 2  # the sequence with the number of blocks, the number of moves


class ShareMove:
    """Moves of a share from `mover`'s pool into the pool at address `target`, whose layout is `layout`."""

    def __init__(self, mover: BlockMover, target: int, layout: KVLayout, share: Share) -> None:
        from kvtransfer.cuda import triton_blocks

        kinds = dict.fromkeys(piece for group in share.groups for piece in group)
        self._kinds = {piece: number for number, piece in enumerate(kinds)}
        self._share, self._found = share, dict[Item, list[Piece]]()
        listed = [_lanes(piece.runs) for piece in kinds]
        lengths = [len(lanes) for lanes, _ in listed]
        ours, theirs = (np.concatenate([each[end] for each in listed]) for end in (0, 1))
        put = partial(torch.tensor, device=mover.device)
        enqueue = partial(
            triton_blocks.move_shares,
            source=mover.address,
            target=target,
            lanes=put(np.stack([ours, theirs], axis=1).astype(np.int32)),
            places=put(_places(layout, theirs)),
            spans=put(np.cumsum([0, *lengths])),
            longest=max(lengths),
            source_lanes=mover.block_bytes // LANE_BYTES,
            target_lanes=layout.block_bytes // LANE_BYTES,
        )
        self.flight, self._units = _flight_of(mover, enqueue)

    def launches(self, moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
        """Split moves into those of one launch each."""
        first = blocks = 0
        for number, move in enumerate(moves):
            count = len(self._pieces_of(move))
            if blocks + count > MAX_BLOCKS or number - first == MAX_BLOCKS:
                yield moves[first:number]
                first, blocks = number, 0
            blocks += count
        yield moves[first:]

    def start(self, moves: Sequence[Move]) -> None:
        """Start the moves of one launch; each has a digest, 0 where the share has nothing of it."""
        units = [
            (move.entry[piece.source], move.block, self._kinds[piece], number)
            for number, move in enumerate(moves)
            for piece in self._pieces_of(move)
        ]
        self.flight.request[1] = len(moves)
        self._units[: len(units)] = np.array(units, dtype=np.int32).reshape(-1, 4)
        self.flight.launch(len(units), digests=len(moves))

    def num_bytes(self, moves: Sequence[Move]) -> int:
        """The bytes that the moves write."""
        return sum(piece.num_bytes for move in moves for piece in self._pieces_of(move))

    def _pieces_of(self, move: Move) -> list[Piece]:
        """The pieces that fill a move's block: they depend on its group and its number in its entry."""
        kind = Item(move.item.group, 0, move.item.number)
        if kind not in self._found:
            self._found[kind] = self._share.pieces(kind)
        return self._found[kind]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLanes:
    """One piece's lanes in a block of the pool, of which packed blocks have nothing else: tables on the pool's device.

    `lanes` [l, 2] int32: from where, and where to. `places` [l] int64: in the whole model's block; None: they arrive, and are
    digested later. `spans` [2] int64: where they begin and end.
    """

    lanes: torch.Tensor
    places: torch.Tensor | None
    spans: torch.Tensor

    @classmethod
    def of(cls, runs: Sequence[Runs], layout: KVLayout | None, device: torch.device) -> PackedLanes:
        """Those of runs that are packed for a receiver of this layout; None: that are unpacked at their destinations here."""
        ours, theirs = _lanes(runs)
        packed, put = np.arange(ours.size), partial(torch.tensor, device=device)
        ends = (packed, theirs) if layout is None else (ours, packed)
        return cls(
            lanes=put(np.stack(ends, axis=1).astype(np.int32)),
            places=None if layout is None else put(_places(layout, theirs)),
            spans=put(np.array([0, ours.size])),
        )


class PackedMove:
    """Moves of one piece of blocks between `mover`'s pool and address `staging` of its device."""

    def __init__(self, mover: BlockMover, staging: int, packed: PackedLanes) -> None:
        from kvtransfer.cuda import triton_blocks

        own, count = mover.block_bytes // LANE_BYTES, len(packed.lanes)
        self._leaves = packed.places is not None
        ends = (mover.address, staging, own, count) if self._leaves else (staging, mover.address, count, own)
        source, target, source_lanes, target_lanes = ends
        enqueue = partial(
            triton_blocks.move_shares,
            source=source,
            target=target,
            lanes=packed.lanes,
            places=packed.places,
            spans=packed.spans,
            longest=count,
            source_lanes=source_lanes,
            target_lanes=target_lanes,
            is_pushed=False,
        )
        self.flight, self._units = _flight_of(mover, enqueue)

    def start(self, blocks: Sequence[int]) -> None:
        """Start moving the piece of these blocks of the pool, at most `MAX_BLOCKS`. Those that leave have a digest each."""
        count, here, there = len(blocks), *((0, 1) if self._leaves else (1, 0))
        self.flight.request[1] = count
        self._units[:count, here] = blocks
        self._units[:count, there] = self._units[:count, 3] = np.arange(count)
        self._units[:count, 2] = 0
        self.flight.launch(count, digests=count if self._leaves else 0)


def _flight_of(mover: BlockMover, enqueue: partial[None]) -> tuple[Flight, npt.NDArray[np.int32]]:
    """Return the flight of a kernel that moves shares, and the words of its request: both blocks, kind, move."""
    flight = Flight(mover.device, mover.stream, enqueue, words=HEAD_WORDS - 1 + 2 * MAX_BLOCKS)
    return flight, flight.request[HEAD_WORDS:].view(np.int32).reshape(-1, 4)


def _places(layout: KVLayout, lanes: Column) -> Column:
    """The places of lanes of this layout's block in the whole model's."""
    return lane_indices(layout)[lanes] if is_sharded(layout) else lanes


def _lanes(runs: Sequence[Runs]) -> tuple[Column, Column]:
    """The lanes of a piece in our block, `ZEROS` for those that have no source, and in the peer's."""
    theirs = [lanes_at(run.destination, run.destination_step, run) for run in runs]
    ours = [
        np.full(there.size, ZEROS) if run.source == ZEROS else lanes_at(run.source, run.source_step, run)
        for run, there in zip(runs, theirs, strict=True)
    ]
    return np.concatenate(ours), np.concatenate(theirs)
