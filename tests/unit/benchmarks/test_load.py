"""The modelled worker of `benchmarks.load`: its costs, its loads, its outcomes."""

from __future__ import annotations

import pytest

from benchmarks.load.admission import Gateway
from benchmarks.load.cells import CELLS, TWO_CARDS, Cell, agents, chat, chosen, long_prompts
from benchmarks.load.device import UNDER_LOAD, PassCosts
from benchmarks.load.model import serve
from benchmarks.load.policies import baton
from worker.device.prompt_budget import PassLoad

SATURATED_PER_S, SECONDS = 28.0, 8.0
CHAT = Cell("chat", "bf16", chat(8))


def test_passes_take_what_the_engine_s_page_says() -> None:
    costs, hot = PassCosts.of("bf16"), UNDER_LOAD["bf16"]
    assert costs.ms(PassLoad(0, 2048, 2048 * 2048 / 2), 0) == pytest.approx(48.8 * hot, rel=0.03)
    assert costs.ms(PassLoad(64), 64 * 1088) == pytest.approx(6.92 * (1 + hot) / 2, rel=0.03)
    assert costs.ms(PassLoad(64, 448), 64 * 1088) > costs.ms(PassLoad(64, 192), 64 * 1088)
    assert {(16, 112), (64, 448), (256, 0), (0, 8192)} <= costs.pass_ms().keys()


def test_a_load_is_the_same_each_time() -> None:
    for requests in (chat(20), long_prompts(0.8), agents(2)):
        assert requests(3.0, None) == requests(3.0, None)
    assert len({cell.name for cell in CELLS.values()}) == len(CELLS)


def test_loads_are_chosen_by_their_keys_and_the_format_of_a_server() -> None:
    assert [cell.name for cell in chosen("fp8-chat-28,chat-14", "bf16")] == ["chat 14/s"]
    assert {cell.name for cell in chosen("")} == {CELLS[key].name for key in CELLS.keys() - {*TWO_CARDS}}
    assert [cell.name for cell in chosen("agents-2")] == ["agents 2/s"]
    with pytest.raises(ValueError, match="'chat-15' is no load: chat-8, "):
        chosen("chat-8,chat-15")


def test_a_light_load_is_served_at_once_and_the_same_each_time() -> None:
    outcomes = [serve(CHAT, baton(), seconds=4.0) for _ in range(2)]
    assert outcomes[0].runs == outcomes[1].runs
    assert len(outcomes[0].runs) == 32
    assert outcomes[0].good == 1.0
    assert 20 < outcomes[0].ttft_ms(0.5) < 60
    assert 4 < outcomes[0].tpot_ms(0.5) < 6


@pytest.mark.long
def test_beyond_saturation_as_many_answers_are_good_as_before_where_goals_decide_who_comes_in() -> None:
    def good_per_s(times: float, *, by_goals: bool) -> float:
        cell = Cell("too much", "bf16", chat(SATURATED_PER_S * times))
        outcome = serve(cell, baton(), seconds=SECONDS, gate=Gateway(by_goals=by_goals))
        return sum(run.is_good for run in outcome.runs) / SECONDS

    most = max(good_per_s(times, by_goals=True) for times in (0.8, 1.0))
    for times in (2, 5, 10):
        assert good_per_s(times, by_goals=True) > 0.95 * most
    assert good_per_s(2, by_goals=False) < 0.5 * most  # all are late otherwise


def test_hardly_anybody_is_refused_below_saturation() -> None:
    outcome = serve(
        Cell("much", "bf16", chat(0.7 * SATURATED_PER_S)), baton(), seconds=8.0, gate=Gateway(by_goals=True)
    )
    assert sum(run.refusal == "goal" for run in outcome.runs) <= 0.01 * len(outcome.runs)


def test_what_was_served_before_is_cached() -> None:
    cold = Cell("cold", "bf16", long_prompts(0.8))
    known = Cell("known", "bf16", long_prompts(0.8), before=long_prompts(0.8))
    cold_ms, known_ms = (serve(cell, baton(), seconds=2.0).ttft_ms(0.5) for cell in (cold, known))
    assert known_ms < cold_ms / 2
