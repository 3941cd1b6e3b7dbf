"""Checks of the kernel that moves a rank's share of blocks, into a peer's pool or by way of a message, against host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from common.pages import KVLayout
from kvtransfer.cuda import triton_blocks
from kvtransfer.cuda.mover import BlockMover
from kvtransfer.cuda.shares import PackedLanes, PackedMove, ShareMove
from kvtransfer.digest import factors_of, lane_view
from kvtransfer.host import copy_moves
from kvtransfer.plan import Item, blocks_per_entry
from kvtransfer.shares import Move, Share, shares
from tests.unit.kernels.triton_checks import Suite
from tests.unit.kvtransfer.widths import MODELS, ranks_of, stages_of

BLOCKS = 40


def check_widths(name: str, device: str, large: bool) -> None:
    """Every rank of a sender writes into each of a receiver's: bytes and digests are those of copies on the host."""
    for before, after in [(1, 2), (2, 1)] + [(2, 4), (4, 2), (1, 4), (4, 1)] * large:
        _check(ranks_of(MODELS[name], before), ranks_of(MODELS[name], after), device)


def check_depths(name: str, device: str, large: bool) -> None:
    """So does every stage, which has some layers of all heads, also into ranks, which have some heads of all layers."""
    parts = MODELS[name]
    of_two = stages_of(parts, 2)
    _check(of_two, stages_of(parts, 1), device)
    _check(stages_of(parts, 1), of_two, device)
    if large:
        for ranks in (ranks_of(parts, 2), ranks_of(parts, 4)):
            _check(of_two, ranks, device)
            _check(ranks, of_two, device)


def _check(sources: list[KVLayout], targets: list[KVLayout], device: str) -> None:
    if device == "cpu":
        triton_blocks.PUSHING_PROGRAMS = triton_blocks.PROGRAMS = 7  # the interpreter runs one after another
    for rank, target in enumerate(targets):
        moves = moves_of(sources[0], target)
        for source, share in zip(sources, shares(sources, target, rank=rank, ranks=len(targets)), strict=True):
            if not share or share.is_whole:
                continue
            ours, theirs = new_pool(source, device), new_pool(target, device)
            if ours.is_cuda:
                torch.cuda.synchronize()  # the mover has a stream of its own
            host, wanted = lane_view(ours.cpu()), lane_view(theirs.cpu().clone())
            digests = copy_moves(share, moves, host, wanted, factors_of(target))
            move = ShareMove(BlockMover(ours, source), theirs.data_ptr(), target, share)
            for _ in range(2):  # the second time with scratch memory that was used
                found = []
                for some in (part for half in (moves[:5], moves[5:]) for part in move.launches(half)):
                    move.start(some)
                    move.flight.wait()
                    assert move.flight.is_done()
                    found.append(move.flight.digests())
                assert b"".join(found) == digests
            assert torch.equal(theirs.cpu(), torch.from_numpy(wanted.view("int32")))
            _check_packed(source, target, share, moves, ours)


def _check_packed(source: KVLayout, target: KVLayout, share: Share, moves: list[Move], ours: torch.Tensor) -> None:
    """The same in messages: of a piece of several blocks each, packed here and unpacked where only the runs are known."""
    theirs = new_pool(target, ours.device.type)
    wanted = lane_view(theirs.cpu().clone())
    digests = np.frombuffer(copy_moves(share, moves, lane_view(ours.cpu()), wanted, factors_of(target)), "<u8")
    staging = torch.full((max(ours.nbytes, theirs.nbytes),), 7, dtype=torch.uint8, device=ours.device)
    if ours.is_cuda:
        torch.cuda.synchronize()
    writer, reader = BlockMover(ours, source), BlockMover(theirs, target)
    found = np.zeros(len(moves), "<u8")
    for piece in dict.fromkeys(piece for group in share.groups for piece in group):
        alike = [at for at, move in enumerate(moves) if piece in share.pieces(move.item)]
        leaving = PackedMove(writer, staging.data_ptr(), PackedLanes.of(piece.runs, target, ours.device))
        said = [replace(run, source=0, source_step=0) for run in piece.runs]  # as a header has them
        arriving = PackedMove(reader, staging.data_ptr(), PackedLanes.of(said, None, ours.device))
        for some in (alike[:2], alike[2:]):
            if not some:
                continue
            leaving.start([moves[at].entry[piece.source] for at in some])
            leaving.flight.wait()
            assert leaving.flight.is_done()
            found[some] += np.frombuffer(leaving.flight.digests(), "<u8")
            arriving.start([moves[at].block for at in some])
            arriving.flight.wait()
            assert arriving.flight.is_done()
            assert not arriving.flight.digests()
    assert found.tolist() == digests.tolist()
    assert torch.equal(theirs.cpu(), torch.from_numpy(wanted.view("int32")))


def new_pool(layout: KVLayout, device: str) -> torch.Tensor:
    shape = layout.num_blocks, layout.block_bytes // 4
    return torch.randint(-(2**31), 2**31 - 1, shape, device=device, dtype=torch.int32)


def moves_of(source: KVLayout, target: KVLayout) -> list[Move]:
    """Two entries of each group, from and into blocks in no order."""
    ours, theirs = (iter(torch.randperm(BLOCKS).tolist() * 2) for _ in range(2))
    sizes = zip(blocks_per_entry(source), blocks_per_entry(target), strict=True)
    moves = []
    for group, (count, there) in enumerate(sizes):
        for entry in range(2):
            blocks = tuple(next(ours) for _ in range(count))
            moves += [Move(Item(group, entry, number), next(theirs), blocks) for number in range(there)]
    return moves


def _is_cut(name: str) -> bool:
    one, (two, _) = ranks_of(MODELS[name], 1), ranks_of(MODELS[name], 2)
    return not one[0].compatible_with(two)


IN_MESSAGES = ("heads", "int8", "windows and states", "latents and keys")  # see `message_checks`
DEEP = ("heads", "int8", "latents and keys", "windows", "states")
CHECKS: dict[str, Callable[[str, bool], None]] = {name: partial(check_widths, name) for name in MODELS if _is_cut(name)}
CHECKS |= {f"{name}, stages": partial(check_depths, name) for name in DEEP}
SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
