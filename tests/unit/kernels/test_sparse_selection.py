"""How much work is launched to choose positions: programs and bytes, told by shapes alone."""

# ruff: noqa: E402 (these imports fail where triton is missing)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.needs import needs

needs("triton")

from engine.kernels.attention import AttentionBatch, AttentionPlan, PrefillPlan, deal_out_tiles
from engine.kernels.launch import Kernel
from engine.kernels.sparse import triton_selection

MOST, TILE, BLOCK = 2048, 128, 64
MOST_PROGRAMS = 132 * triton_selection.PROGRAMS_A_PROCESSOR  # of Hopper, which grids are made for without a GPU

Launch = tuple[int, int, int]  # programs, first row, rows


def plan_of(lengths: list[tuple[int, int]]) -> tuple[AttentionPlan, np.ndarray[Any, Any]]:
    """The plan for prompts of (new tokens, context), and its tiles."""
    new, contexts = (np.array(each) for each in zip(*lengths, strict=True))
    tiles = deal_out_tiles(new, contexts, np.zeros(len(new), dtype=np.int64), rows=TILE)
    table = torch.zeros((len(new), -(-max(contexts) // BLOCK)), dtype=torch.int32)
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(new)))).int()
    batch = AttentionBatch(starts, torch.from_numpy(contexts).int(), table, int(max(new)), int(max(contexts)))
    prompts = PrefillPlan(batch, torch.from_numpy(tiles), TILE, 0, None)
    return AttentionPlan(0, None, {}, table, prompts), tiles


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Of the scores of prompts, which no kernel computes."""
    found: list[Launch] = []

    def note(kernel: Kernel, grid: tuple[int, ...], variant: object, *given: Any, **named: Any) -> None:
        if kernel is triton_selection._SCORE:
            found.append((grid[0], *given[8:10]))

    with mock.patch.object(Kernel, "launch", note):
        yield found


def launched(lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of each launch the programs, and the pieces of a tile's context that have scores."""
    plan, tiles = plan_of(lengths)
    rows = sum(new for new, _ in lengths)
    q, keys = torch.empty((rows, 4, 16)), torch.empty((1, 1, BLOCK, 1, 16))
    with launches() as found:
        triton_selection.selected_positions(
            q, torch.empty(rows, 4), torch.empty(rows, dtype=torch.int32), keys, plan, MOST, 1 << 17
        )
    return [(programs, _pieces(tiles, first, count)) for programs, first, count in found]


def _pieces(tiles: np.ndarray[Any, Any], first: int, count: int) -> int:
    stop = np.minimum(tiles[:, 0] + tiles[:, 1], first + count) - tiles[:, 0]
    begin = np.maximum(first - tiles[:, 0], MOST - tiles[:, 2])
    ends = np.where(np.maximum(begin, 0) < stop, tiles[:, 2] + stop, 0)
    return int((-(-ends // triton_selection.PROMPT_STEP)).sum())


@pytest.mark.parametrize(
    ("new", "context"), [(8192, 8192), (3000, 3000), (2048, 1 << 17), (8192, 1 << 17), (100, 1 << 17), (8192, 100_000)]
)
def test_no_program_of_one_prompt_is_idle(new: int, context: int) -> None:
    found = launched([(new, context)])
    assert found
    assert all(0 < programs <= min(pieces, MOST_PROGRAMS) for programs, pieces in found), found


def test_a_prompt_that_sees_no_more_than_it_attends_to_launches_none() -> None:
    assert not launched([(1024, 1024), (1, MOST)])


def test_programs_of_prompts_beside_a_long_one_are_bounded() -> None:
    found = launched([(4096, 1 << 17)] + [(64, 3000)] * 30)
    assert sum(pieces for _, pieces in found) > 20_000
    assert all(programs <= MOST_PROGRAMS for programs, _ in found), found
