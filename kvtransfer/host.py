"""Copies of a share within host memory, digested as the receiver's rank will digest them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from common.pages import LANE_BYTES
from kvtransfer.digest import Factors
from kvtransfer.plan import Runs
from kvtransfer.shares import ZEROS, Move, Piece, Share

Lanes = npt.NDArray[np.uint32]
Number = TypeVar("Number", np.uint32, np.uint64)


def copy_moves(share: Share, moves: Sequence[Move], source: Lanes, target: Lanes, factors: Factors) -> bytes:
    """Copy a share from pool to pool [num_blocks, lanes]; return the digests, one a move. `factors` are the target's."""
    digests = []
    for move in moves:
        total = 0
        for piece in share.pieces(move.item):
            block = source[move.entry[piece.source]]
            for run in piece.runs:
                lanes = lanes_of(block, run)
                strip(target[move.block], run.destination, run.destination_step, run)[...] = lanes
                total += digest_of(lanes, run, factors)
        digests.append(total)
    return packed(digests)


def gather(piece: Piece, move: Move, source: Lanes, buffer: Lanes, factors: Factors) -> int:
    """Write a piece of a move's lanes one after the other into a buffer; return their digest."""
    total, at, block = 0, 0, source[move.entry[piece.source]]
    for run in piece.runs:
        lanes = lanes_of(block, run)
        buffer[at : at + lanes.size] = lanes.reshape(-1)
        total, at = total + digest_of(lanes, run, factors), at + lanes.size
    return total


def scatter(runs: Sequence[Runs], buffer: Lanes, block: Lanes) -> None:
    """Write lanes that `gather` packed into a block."""
    at = 0
    for run in runs:
        there = strip(block, run.destination, run.destination_step, run)
        there[...] = buffer[at : at + there.size].reshape(there.shape)
        at += there.size


def strip(block: npt.NDArray[Number], start: int, step: int, run: Runs) -> npt.NDArray[Number]:
    """View a run of a block [lanes] as [count, lanes]; `start` and `step` are in bytes."""
    per_run, item = run.num_bytes // LANE_BYTES, block.itemsize
    shape, strides = (run.count, per_run), (step // LANE_BYTES * item, item)
    return np.lib.stride_tricks.as_strided(block[start // LANE_BYTES :], shape, strides)


def lanes_of(block: Lanes, run: Runs) -> Lanes:
    """The lanes of a run at its source."""
    if run.source == ZEROS:
        return np.zeros((run.count, run.num_bytes // LANE_BYTES), np.uint32)
    return strip(block, run.source, run.source_step, run)


def digest_of(lanes: Lanes, run: Runs, factors: Factors) -> int:
    """The share of a run in its target block's digest (`kvtransfer.digest`)."""
    there = strip(factors, run.destination, run.destination_step, run)
    return int(((lanes.astype(np.uint64) + np.uint64(1)) * there).sum(dtype=np.uint64))


def packed(digests: Sequence[int]) -> bytes:
    """Pack sums as little-endian u64."""
    return np.array([total % 2**64 for total in digests], "<u8").tobytes()


def added(parts: Sequence[bytes]) -> bytes:
    """Add packed digests of shares: those of whole blocks."""
    first, *others = (np.frombuffer(part, "<u8") for part in parts)
    total = first.copy()
    for other in others:
        total += other
    return total.tobytes()
