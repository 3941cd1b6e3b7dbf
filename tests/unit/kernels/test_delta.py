"""The gated delta rule: its reference, its Triton kernels, and how prompts are cut for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.delta import deal_out_states, max_tiles
from engine.kernels.delta.plan import CARRIED, NOTHING, TILE_ROWS
from tests.unit.kernels import channel_checks, convolution_checks, delta_checks
from tests.unit.kernels.interpreter import Interpreter

SMALL = ("small", "together", "odd")


@pytest.mark.parametrize("name", SMALL)
def test_the_reference(name: str) -> None:
    delta_checks.run(name, "cpu")


@pytest.mark.quick("together", "odd")
@pytest.mark.parametrize("name", SMALL)
def test_the_kernels(interpreter: Interpreter, name: str) -> None:
    interpreter.check("delta_checks", name)


@pytest.mark.parametrize("name", ["small", "odd", "tiles"])
def test_decays_of_channels(name: str) -> None:
    channel_checks.run(name, "cpu")


@pytest.mark.quick("odd", "tiles")
@pytest.mark.parametrize("name", ["small", "odd", "tiles"])
def test_the_kernels_of_decays_of_channels(interpreter: Interpreter, name: str) -> None:
    interpreter.check("channel_checks", name)


@pytest.mark.parametrize("name", convolution_checks.SPECS)
def test_the_convolution(name: str) -> None:
    convolution_checks.run(name, "cpu")


@pytest.mark.parametrize("name", convolution_checks.SPECS)
def test_the_convolutions_kernels(interpreter: Interpreter, name: str) -> None:
    interpreter.check("convolution_checks", name)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=4),
    block_size=st.sampled_from([8, 16, 64, 1024]),
    in_place=st.sampled_from([1, 2, 5, 80]),
)
def test_tiles_cover_every_prompt_once_and_end_where_a_state_moves(
    prompts: list[tuple[int, int]], block_size: int, in_place: int
) -> None:
    starts, counts = np.array(prompts, dtype=np.int64).T
    ends, rows = starts + counts, np.cumsum(counts) - counts
    tables = np.arange(80 * len(prompts), dtype=np.int32).reshape(len(prompts), 80) // in_place
    tiles, runs = deal_out_states(starts, ends, rows, tables, block_size=block_size)
    assert len(tiles) <= max_tiles(int(counts.sum()), len(prompts), block_size)
    for (first, count), start, end, row, table in zip(runs.tolist(), starts, ends, rows, tables, strict=True):
        at = start
        before = table[(start - 1) // block_size] if start else NOTHING
        for index, tile in enumerate(tiles[first : first + count].tolist()):
            assert tile[:2] == [row + at - start, tile[1]]
            assert 1 <= tile[1] <= TILE_ROWS
            assert tile[2] == (CARRIED if index else before)
            assert tile[4:6] == [row, before]
            places = set(table[at // block_size : (at + tile[1] - 1) // block_size + 1].tolist())
            assert len(places) == 1, "a tile changes one place"
            at += tile[1]
            moves = at == end or table[at // block_size] not in places
            assert tile[3] == (places.pop() if moves else NOTHING)
            assert moves or tile[1] == TILE_ROWS
        assert at == end
