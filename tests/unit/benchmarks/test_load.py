"""The modelled worker of `benchmarks.load`: its costs, its loads, its outcomes."""

from __future__ import annotations

import pytest

from benchmarks.load.cells import CELLS, Cell, chat, chosen, long_prompts
from benchmarks.load.device import UNDER_LOAD, PassCosts
from benchmarks.load.model import serve
from benchmarks.load.policies import baton
from worker.device.prompt_budget import PassLoad

CHAT = Cell("chat", "bf16", chat(8))


def test_passes_take_what_the_engine_s_page_says() -> None:
    costs, hot = PassCosts.of("bf16"), UNDER_LOAD["bf16"]
    assert costs.ms(PassLoad(0, 2048, 2048 * 2048 / 2), 0) == pytest.approx(48.8 * hot, rel=0.03)
    assert costs.ms(PassLoad(64), 64 * 1088) == pytest.approx(6.92 * (1 + hot) / 2, rel=0.03)
    assert costs.ms(PassLoad(64, 448), 64 * 1088) > costs.ms(PassLoad(64, 192), 64 * 1088)
    assert {(16, 112), (64, 448), (256, 0), (0, 8192)} <= costs.pass_ms().keys()


def test_a_load_is_the_same_each_time() -> None:
    for requests in (chat(20), long_prompts(0.8)):
        assert requests(3.0, None) == requests(3.0, None)
    assert len({cell.name for cell in CELLS.values()}) == len(CELLS)


def test_loads_are_chosen_by_their_keys_and_the_format_of_a_server() -> None:
    assert [cell.name for cell in chosen("fp8-chat-28,chat-14", "bf16")] == ["chat 14/s"]
    assert len(chosen("")) == len(CELLS)
    with pytest.raises(ValueError, match="'chat-15' is no load: chat-8, "):
        chosen("chat-8,chat-15")


def test_a_light_load_is_served_at_once_and_the_same_each_time() -> None:
    outcomes = [serve(CHAT, baton(), seconds=4.0) for _ in range(2)]
    assert outcomes[0].runs == outcomes[1].runs
    assert len(outcomes[0].runs) == 32
    assert outcomes[0].good == 1.0
    assert 20 < outcomes[0].ttft_ms(0.5) < 60
    assert 4 < outcomes[0].tpot_ms(0.5) < 6


def test_what_was_served_before_is_cached() -> None:
    cold = Cell("cold", "bf16", long_prompts(0.8))
    known = Cell("known", "bf16", long_prompts(0.8), before=long_prompts(0.8))
    cold_ms, known_ms = (serve(cell, baton(), seconds=2.0).ttft_ms(0.5) for cell in (cold, known))
    assert known_ms < cold_ms / 2
