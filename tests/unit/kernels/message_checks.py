"""Checks of shares that go through messages of UCX, from pool to pool: packed and unpacked by the kernel that moves shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from common.pages import KVLayout
from kvtransfer.cuda import triton_blocks
from kvtransfer.digest import factors_of, lane_view
from kvtransfer.host import copy_moves
from kvtransfer.shares import shares
from kvtransfer.ucx import memory
from kvtransfer.ucx.transport import UcxTransport
from tests.unit.kernels.share_checks import DEEP, IN_MESSAGES, moves_of, new_pool
from tests.unit.kernels.triton_checks import Suite
from tests.unit.kvtransfer.widths import MODELS, ranks_of, stages_of

LEASE = {"lease_id": 3, "generation": 5}
TIMEOUT_S = 120.0


def check_widths(name: str, device: str, large: bool) -> None:
    """From one rank to two and back, from two stages to two ranks: bytes and digests are those of copies on the host."""
    parts = MODELS[name]
    one, two = ranks_of(parts, 1), ranks_of(parts, 2)
    pairs = [(one, two), (two, one)]
    if large and name in DEEP:
        pairs.append((stages_of(parts, 2), two))
    for sources, targets in pairs:
        asyncio.run(_check(sources, targets, device))


async def _check(sources: list[KVLayout], targets: list[KVLayout], device: str) -> None:
    patches: list[Any] = [mock.patch.object(memory.DeviceMemory, "min_piece_bytes", 1)]  # several messages of a run
    if device == "cpu":
        patches += [
            mock.patch.multiple(triton_blocks, PUSHING_PROGRAMS=7, PROGRAMS=7),
            mock.patch.object(memory, "memory_of", memory.DeviceMemory),
            mock.patch("kvtransfer.ucx.transport.memory_of", memory.DeviceMemory),
            mock.patch.object(memory, "Array", lambda staging, array=memory.Array: array(staging.numpy())),
        ]
    for patch in patches:
        patch.start()
    try:
        for rank, target in enumerate(targets):
            found = shares(sources, target, rank=rank, ranks=len(targets))
            for source, share in zip(sources, found, strict=True):
                if share and not share.is_whole:
                    await _push(source, target, share, device)
    finally:
        for patch in reversed(patches):
            patch.stop()


async def _push(source: KVLayout, target: KVLayout, share: Any, device: str) -> None:
    ours, theirs, moves = new_pool(source, device), new_pool(target, device), moves_of(source, target)
    if device != "cpu":
        torch.cuda.synchronize()
    wanted = lane_view(theirs.cpu().clone())
    digests = copy_moves(share, moves, lane_view(ours.cpu()), wanted, factors_of(target))
    writer, reader = UcxTransport(), UcxTransport()
    async with asyncio.timeout(TIMEOUT_S):
        await writer.open(ours, source, 1)
        region = await reader.open(theirs, target, 2)
        try:
            link = await writer.connect_share(region, share)
            for _ in range(2):
                reader.expect(*LEASE.values(), [move.block for move in moves])
                pushed = await link.push_moves(**LEASE, moves=moves, timeout_s=TIMEOUT_S)
                assert np.frombuffer(pushed, "<u8").tolist() == np.frombuffer(digests, "<u8").tolist()
                reader.forget(*LEASE.values())
        finally:
            await writer.close()
            await reader.close()
    assert torch.equal(theirs.cpu(), torch.from_numpy(wanted.view("int32")))


CHECKS: dict[str, Callable[[str, bool], None]] = {name: partial(check_widths, name) for name in IN_MESSAGES}
SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
