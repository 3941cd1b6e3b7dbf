"""A decode pass's work, dealt out: every position once, and in no more steps than without a cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.attention import DECODE_PROGRAMS, deal_out, max_items, point


@given(
    contexts=st.lists(st.integers(1, 20_000), min_size=1, max_size=80),
    window=st.sampled_from([0, 1, 100, 4096]),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
)
def test_items_cover_every_position_once_and_are_over_as_early_as_whole_contexts(
    contexts: list[int], window: int, num_kv_heads: int
) -> None:
    lengths, offsets = np.array(contexts), np.arange(len(contexts)) * 10_000
    items, parts = deal_out(lengths, window=window, num_kv_heads=num_kv_heads)
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
    assert len(items) == parts[:, 1].sum() <= max_items(len(contexts), num_kv_heads)
    at_once = DECODE_PROGRAMS // num_kv_heads
    steps = np.ceil((items[:, 2] - items[:, 1]) / 64).max() + 1
    whole = np.ceil(np.minimum(lengths, window or 20_000).max() / 64) + 1
    assert np.ceil(len(items) / at_once) * steps <= np.ceil(len(contexts) / at_once) * whole


def test_a_number_of_contexts_that_fills_no_round_is_cut_further() -> None:
    """17 contexts are 136 programs of 8 heads, which leave half of a GPU idle: in three pieces each they take two full rounds."""
    items, _ = deal_out(np.full(17, 2112), window=0, num_kv_heads=8)
    assert len(items) == 3 * 17
