"""The fit of a prompt's time: its parts are found where passes differ enough, and nothing wild is said where they don't."""

from __future__ import annotations

import random

import pytest

from worker.device.costs import PromptCost, pairs_of

FIXED_S, TOKEN_S, DOUBLE = 0.002, 1 / 40_000, 19_000


def seconds(start: int, end: int) -> float:
    return FIXED_S + TOKEN_S * (end - start) + TOKEN_S / DOUBLE * pairs_of(start, end)


def fitted(*passes: tuple[int, int], noise: float = 0.0) -> PromptCost:
    chance, cost = random.Random(1), PromptCost()
    for start, end in passes:
        cost.add(end - start, pairs_of(start, end), seconds(start, end) * (1 + noise * chance.uniform(-1, 1)))
    return cost


def mixed(count: int) -> list[tuple[int, int]]:
    chance = random.Random(2)
    starts = [chance.choice([0, 0, chance.randrange(30_000)]) for _ in range(count)]
    return [(start, start + chance.randint(100, 8192)) for start in starts]


def test_pairs_are_counted_by_halves() -> None:
    assert pairs_of(0, 8192) == 8192 * 8192 / 2
    assert pairs_of(0, 100) + pairs_of(100, 300) == pairs_of(0, 300)


def test_passes_of_all_sizes_tell_the_three_parts_apart() -> None:
    cost = fitted(*mixed(20))
    assert cost.tokens_per_s == pytest.approx(1 / TOKEN_S)
    assert cost.double_tokens == pytest.approx(DOUBLE)
    assert cost.fixed_ms == pytest.approx(1000 * FIXED_S)


def test_noise_moves_the_parts_a_little() -> None:
    cost = fitted(*mixed(100), noise=0.02)
    assert cost.tokens_per_s == pytest.approx(1 / TOKEN_S, rel=0.1)
    assert cost.double_tokens == pytest.approx(DOUBLE, rel=0.3)


def test_full_passes_of_long_prompts_tell_attention_and_a_rate() -> None:
    cost = fitted(*((start, start + 8192) for start in range(0, 60_000, 8192)))
    assert cost.tokens_per_s == pytest.approx(1 / TOKEN_S, rel=0.02)
    assert cost.double_tokens == pytest.approx(DOUBLE, rel=0.02)


def test_prompts_of_one_length_tell_a_rate_alone() -> None:
    cost = fitted(*[(0, 512)] * 10)
    assert cost.double_tokens == 0
    assert cost.tokens_per_s == pytest.approx(512 / seconds(0, 512))


def test_what_was_learnt_of_attention_is_kept_while_prompts_are_alike() -> None:
    cost = fitted(*mixed(20), *[(0, 2048)] * 200)
    assert cost.double_tokens == pytest.approx(DOUBLE, rel=0.1)


def test_passes_without_attention_have_none() -> None:
    cost = PromptCost()
    for start, end in mixed(20):
        cost.add(end - start, pairs_of(start, end), TOKEN_S * (end - start))
    assert cost.tokens_per_s == pytest.approx(1 / TOKEN_S)
    assert cost.double_tokens == 0 or cost.double_tokens > 1e6


def test_prompts_timed_at_the_start_tell_all_parts_and_are_not_forgotten() -> None:
    cost = PromptCost({tokens: seconds(0, tokens) for tokens in (256, 512, 1024, 2048, 8192)})
    assert cost.double_tokens == pytest.approx(DOUBLE)
    for _ in range(200):
        cost.add(60, pairs_of(0, 60), seconds(0, 60))
    assert cost.tokens_per_s == pytest.approx(1 / TOKEN_S)
    assert cost.fixed_ms == pytest.approx(1000 * FIXED_S)
    assert cost.double_tokens == pytest.approx(DOUBLE)


def test_the_average_is_a_fixed_cost_and_a_rate() -> None:
    cost = PromptCost()
    for tokens in (100, 900, 400, 2000):
        cost.add(tokens, pairs_of(0, tokens), 0.003 + tokens / 40_000)
    assert cost.average_fixed_ms == pytest.approx(3)
    assert cost.average_tokens_per_s == pytest.approx(40_000)


def test_prompts_of_one_length_tell_an_average_rate_alone() -> None:
    cost = PromptCost()
    for _ in range(5):
        cost.add(512, pairs_of(0, 512), 0.0128)
    assert cost.average_fixed_ms == pytest.approx(0.0)
    assert cost.average_tokens_per_s == pytest.approx(40_000)


def test_short_prompts_do_not_change_what_long_ones_took() -> None:
    """A short pass is slower than its tokens at the full rate: prompts of that kind alone would make every long one look slow."""
    cost = PromptCost({256: 0.0075, 512: 0.012, 1024: 0.023, 2048: 0.045})
    assert cost.average_tokens_per_s == pytest.approx(46_500, rel=0.05)
    for _ in range(100):
        cost.add(128, pairs_of(0, 128), 0.0062)
    assert _of_2048(cost) == pytest.approx(0.045, rel=0.05)
    for _ in range(100):
        cost.add(2048, pairs_of(0, 2048), 0.09)  # the device is slower than it was
    assert _of_2048(cost) == pytest.approx(0.09, rel=0.1)


def _of_2048(cost: PromptCost) -> float:
    return cost.average_fixed_ms / 1000 + 2048 / cost.average_tokens_per_s


def test_passes_that_find_the_device_idle_count_little_beside_those_of_a_queue_and_all_where_there_are_no_others() -> (
    None
):
    queued, idle = 512 / 0.012, 512 / 0.010
    cost = PromptCost()
    for _ in range(60):
        cost.add(512, pairs_of(0, 512), 0.010, after_idling=True)
    assert cost.average_tokens_per_s == pytest.approx(idle)
    for seconds_, idled in ((0.012, False), (0.010, True)) * 60:
        cost.add(512, pairs_of(0, 512), seconds_, after_idling=idled)
    assert queued < cost.average_tokens_per_s < queued + 0.25 * (idle - queued)


@pytest.mark.parametrize(
    ("fixed_s", "token_s", "full"),
    [
        (0.0, 0.0, 2048),  # not measured yet
        (0.005, 1 / 40_000, 2048),  # a GPU
        (0.002, 1 / 500, 51),  # a tenth of a second
        (0.02, 1 / 1000, 400),  # twenty times the fixed part
    ],
)
def test_a_full_pass_is_one_whose_fixed_part_is_small(fixed_s: float, token_s: float, full: int) -> None:
    cost = PromptCost()
    for tokens in (100, 200, 400, 800) if token_s else ():
        cost.add(tokens, pairs_of(0, tokens), fixed_s + tokens * token_s)
    assert cost.full_pass_tokens(2048) == pytest.approx(full, rel=0.03)
