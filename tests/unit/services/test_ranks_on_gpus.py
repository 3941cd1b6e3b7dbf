"""Ranks of stages on GPUs, without GPUs: who exchanges what with whom."""
# ruff: noqa: E402 (these imports fail where triton is missing)

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.needs import needs

needs("triton")

from engine.parallel.group import RankLostError
from engine.parallel.shared_memory import SharedMemoryGroup
from kvtransfer.cuda.driver import CudaDriverError
from services.rank.devices import group_on, ranks_on
from tests.unit.kernels.card import made_up
from tests.unit.kernels.dry import Ordered


def test_gpus_that_do_not_reach_each_other_are_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CudaDriverError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)")
    monkeypatch.setattr("services.rank.devices.SymmetricMemory", mock.Mock(side_effect=refused))
    host = SharedMemoryGroup(mmap.mmap(-1, SharedMemoryGroup.num_bytes(1)), rank=0, size=1)
    with made_up(lambda *launch: None):
        group = group_on(host, "cuda")
        with pytest.raises(ValueError, match=r"--tensor-parallel-size: the GPUs of ranks .* take stages .*\(cuIpcOpen"):
            group.meet()


def test_ranks_of_a_stage_on_gpus_share_inboxes_and_all_see_whom_one_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes as threads on a card that isn't there: each exchanges the handle of its inbox within its stage."""
    memory = mmap.mmap(-1, SharedMemoryGroup.num_bytes(4))
    hosts = [SharedMemoryGroup(memory, rank=rank, size=4) for rank in range(4)]
    told = dict[int, list[bytes]]()

    def mapped(inbox: torch.Tensor, rank: int, exchange: Callable[[bytes], list[bytes]]) -> Any:
        told[inbox.data_ptr()] = exchange(inbox.data_ptr().to_bytes(8, "little"))
        return SimpleNamespace(addresses=[int.from_bytes(each, "little") for each in told[inbox.data_ptr()]])

    monkeypatch.setattr("services.rank.devices.SymmetricMemory", mapped)
    with made_up(lambda *launch: None) as card:
        monkeypatch.setattr("services.rank.devices.StreamSignals", lambda pinned, device: Ordered(card, pinned))
        ranks = [ranks_on(host, "cuda", stages=2) for host in hosts]
        assert [(each.number, each.stage.place, each.group.rank) for each in ranks] == [
            (0, (0, 2), 0),
            (1, (0, 2), 1),
            (2, (1, 2), 0),
            (3, (1, 2), 1),
        ]
        groups: list[Any] = [each.group for each in ranks]
        inboxes = [group._inbox.data_ptr() for group in groups]
        with ThreadPoolExecutor(4) as threads:
            for meeting in [threads.submit(group.meet) for group in groups]:
                meeting.result()
        assert [group._addresses.tolist() for group in groups] == [inboxes[:2]] * 2 + [inboxes[2:]] * 2
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(each.fewest or int, count) for each, count in zip(ranks, (9, 8, 7, 6), strict=True)]
            assert [each.result() for each in asked] == [6] * 4
        for each in ranks:
            each.check()
        groups[2]._lost[1] = 1  # as its kernel does
        for each in ranks:
            with pytest.raises(RankLostError, match=r"^rank 3 sent nothing to rank 2 in time"):
                each.check()
