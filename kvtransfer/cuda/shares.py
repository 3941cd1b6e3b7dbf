"""Moving a share of blocks on a GPU into the pool of a rank that keeps other heads or layers, digesting it on the way.

The runs of a share are the same for every entry, so their lanes are listed once, on the device, when a link opens: where each
is in our block and in the peer's, and its place in the whole model's block, which its digest depends on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        places = lane_indices(layout)[theirs] if is_sharded(layout) else theirs
        put = partial(torch.tensor, device=mover.device)
        enqueue = partial(
            triton_blocks.move_shares,
            source=mover.address,
            target=target,
            lanes=put(np.stack([ours, theirs], axis=1).astype(np.int32)),
            places=put(places),
            spans=put(np.cumsum([0, *lengths])),
            longest=max(lengths),
            source_lanes=mover.block_bytes // LANE_BYTES,
            target_lanes=layout.block_bytes // LANE_BYTES,
        )
        self.flight = Flight(mover.device, mover.stream, enqueue, words=HEAD_WORDS - 1 + 2 * MAX_BLOCKS)
        self._units = self.flight.request[HEAD_WORDS:].view(np.int32).reshape(-1, 4)  # both blocks, kind, move

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


def _lanes(runs: Sequence[Runs]) -> tuple[Column, Column]:
    """The lanes of a piece in our block, `ZEROS` for those that have no source, and in the peer's."""
    theirs = [lanes_at(run.destination, run.destination_step, run) for run in runs]
    ours = [
        np.full(there.size, ZEROS) if run.source == ZEROS else lanes_at(run.source, run.source_step, run)
        for run, there in zip(runs, theirs, strict=True)
    ]
    return np.concatenate(ours), np.concatenate(theirs)
