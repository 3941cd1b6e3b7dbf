"""A pass's work, dealt out: every position once, and in no more steps than without a cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.attention import Tiling, deal_out, deal_out_tiles, items_at_once, max_items, point
from engine.kernels.attention.split import HOPPER_STEP, LARGE_TILE, MIN_STEPS_PER_PART
from engine.kernels.device import Device

HOPPER = Device(processors=132, has_tma=True, is_hopper=True)


@given(
    contexts=st.lists(st.integers(1, 20_000), min_size=1, max_size=80),
    window=st.sampled_from([0, 1, 100, 4096]),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    processors=st.sampled_from([108, 132, 148]),
)
def test_items_cover_every_position_once_and_are_over_as_early_as_whole_contexts(
    contexts: list[int], window: int, num_kv_heads: int, processors: int
) -> None:
    lengths, offsets = np.array(contexts), np.arange(len(contexts)) * 10_000
    at_once = items_at_once(Device(processors=processors, has_tma=True, is_hopper=False), num_kv_heads)
    items, parts = deal_out(lengths, window=window, at_once=at_once, queries=1)
    point(items, 0, 10_000)
    for sequence, (context, (first, count)) in enumerate(zip(contexts, parts, strict=True)):
        own = items[first : first + count]
        begin = max(0, context - window) if window else 0
        assert (own[0, 1], own[-1, 2]) == (begin, context)
        assert (own[1:, 1] == own[:-1, 2]).all()
        assert (own[:, 1] < own[:, 2]).all()
        assert (own[:, 0] == sequence).all()
        assert (own[:, 3] == (count == 1)).all()
        assert (own[:, 4] == offsets[sequence]).all()
    assert len(items) == parts[:, 1].sum() <= max_items(len(contexts), at_once)
    steps = np.ceil((items[:, 2] - items[:, 1]) / 64).max() + 1
    whole = np.ceil(np.minimum(lengths, window or 20_000).max() / 64) + 1
    assert np.ceil(len(items) / at_once) * steps <= np.ceil(len(contexts) / at_once) * whole


@given(
    drafts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3000)), min_size=1, max_size=20),
    queries=st.sampled_from([1, 2, 4, 5, 8]),
)
def test_drafted_rows_share_the_items_of_their_sequence(drafts: list[tuple[int, int]], queries: int) -> None:
    new, before = np.array(drafts).T
    at = np.concatenate([np.arange(count) for count in new])
    ends = np.repeat(before, new) + at + 1
    items, parts = deal_out(ends, window=0, at_once=4, queries=queries, drafted=at > 0)

    for row, (end, (part, count)) in enumerate(zip(ends, parts, strict=True)):
        own, query = items[part // queries :][:count], part % queries
        assert (own[:, 0] + query == row).all()
        assert (own[:, 5] > query).all()
        assert (own[:, 6] + query == end).all()
        assert own[0, 1] == 0
        assert (own[1:, 1] == own[:-1, 2]).all()
        assert own[-1, 2] >= end
        assert (own[:, 3] == (count == 1)).all()
    assert len(items) == parts[at % queries == 0, 1].sum() <= max_items(len(ends), 4)
    assert (items[:, 5] <= queries).all()


def test_a_number_of_contexts_that_fills_no_round_is_cut_further() -> None:
    """17 contexts are 136 programs of 8 heads, half of what a GPU computes at once. Three pieces each take two full rounds."""
    items, _ = deal_out(np.full(17, 2112), window=0, at_once=items_at_once(HOPPER, 8), queries=1)
    assert len(items) == 3 * 17


@given(
    prompts=st.lists(st.tuples(st.integers(1, 600), st.integers(0, 20_000)), min_size=1, max_size=6),
    at_once=st.sampled_from([0, 1, 3, 4, 16, 132]),
)
def test_few_tiles_behind_long_contexts_are_cut_into_parts_of_which_every_query_sees_some(
    prompts: list[tuple[int, int]], at_once: int
) -> None:
    new, before = np.array(prompts).T
    starts = np.cumsum(new + before)
    whole = deal_out_tiles(new, new + before, starts, rows=LARGE_TILE)
    tiles = deal_out_tiles(new, new + before, starts, rows=LARGE_TILE, at_once=at_once)

    assert (whole[:, 5:7] == (0, 1)).all()
    assert len(tiles) <= max(len(whole), at_once)
    at = 0
    for tile in whole:
        parts = int(tiles[at, 6])
        own, at = tiles[at : at + parts], at + parts
        assert (own[:, :5] == tile[:5]).all()
        assert list(own[:, 5]) == list(range(parts))
        assert (own[:, 6] == parts).all()
        steps = -(-(tile[2] + tile[1]) // HOPPER_STEP)  # part p has [steps p / parts, steps (p + 1) / parts)
        assert parts == 1 or steps // parts >= MIN_STEPS_PER_PART
        assert parts == 1 or steps * (parts - 1) // parts * HOPPER_STEP <= tile[2]
    assert at == len(tiles)


def test_a_chunk_behind_a_long_context_keeps_a_whole_gpu_busy() -> None:
    tiles = deal_out_tiles(np.array([112]), np.array([8112]), np.zeros(1, dtype=np.int64), rows=LARGE_TILE, at_once=4)
    assert tiles[:, 5:7].tolist() == [[0, 4], [1, 4], [2, 4], [3, 4]]


def test_only_large_tiles_are_cut_and_small_ones_stay_where_no_context_is() -> None:
    cut = Tiling(64, 128, 4)
    assert [cut.rows(40, behind=False), cut.rows(40, behind=True), cut.rows(600, behind=False)] == [64, 128, 128]
    assert Tiling(64, 128).rows(40, behind=True) == 64
    new, context, start = np.array([40]), np.array([8040]), np.zeros(1, dtype=np.int64)
    assert len(cut.deal_out(new, context, start, rows=128)) == 4
    assert len(cut.deal_out(new, context, start, rows=64)) == 1


def test_every_row_is_in_one_tile_and_none_is_empty_the_most_work_first() -> None:
    for rows in (16, 64, 128):
        new, context = np.array([(1, 50), (200, 200), (128, 4000), (129, 129)]).T
        tiles = deal_out_tiles(new, context, np.cumsum(context) - context, rows=rows)
        assert tiles.dtype == np.int32
        covered = sorted(row for first, count, *_ in tiles.tolist() for row in range(first, first + count))
        assert covered == list(range(new.sum()))
        starts, contexts = np.cumsum(new) - new, np.cumsum(context) - context
        for first, count, position, key, sequence, *_ in tiles.tolist():
            assert 0 < count <= rows
            assert position == context[sequence] - new[sequence] + first - starts[sequence]
            assert key == contexts[sequence]
            assert first + count <= starts[sequence] + new[sequence]
        assert list(tiles[:, 2]) == sorted(tiles[:, 2], reverse=True)
