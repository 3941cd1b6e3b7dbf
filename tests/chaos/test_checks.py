"""Each check is shown a planted bug: what can't find one proves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from benchmarks.results_format import Result
from common.messages import KVLayout, Region, WorkerState
from common.words import WorkerStatus
from tests.chaos import checks
from tests.chaos.__main__ import merged
from tests.chaos.asks import KINDS, Ask, Oracle, Seen, ask
from tests.chaos.holdings import Holdings, growth
from tests.chaos.load import GRACE_S, Outcome

DEADLINE_S = 10.0


def right(asked: Ask, oracle: Oracle, *, seconds: float = 1.0) -> Outcome:
    """A whole and right answer."""
    outcome = Outcome(ask=asked, started=100.0, ended=100.0 + seconds, status=200, is_whole=True)
    outcome.choices = oracle.answer(asked.body)
    outcome.arrivals = [100.0 + 0.1 * index for index in range(5)]
    return outcome


@pytest.fixture(params=range(len(KINDS)), ids=KINDS)
def outcome(request: pytest.FixtureRequest, oracle: Oracle) -> Outcome:
    return right(ask(request.param, oracle, deadline_s=DEADLINE_S), oracle)


def test_a_right_answer_and_its_beginning_pass(outcome: Outcome, oracle: Oracle) -> None:
    assert checks.wrong([outcome], oracle.answer) == []
    partial = dataclasses.replace(outcome, is_whole=False)
    seen = partial.choices[0]
    partial.choices[0] = Seen(tokens=seen.tokens[:3], text=seen.text[:1])
    assert checks.wrong([partial], oracle.answer) == []


def planted(seen: Seen) -> dict[str, Seen]:
    tokens, text, finish = seen.tokens, seen.text, seen.finish
    return {
        "a wrong token": Seen(tokens=[*tokens[:2], tokens[2] ^ 1, *tokens[3:]], text=text, finish=finish),
        "a repeated token": Seen(tokens=[*tokens[:2], tokens[1], *tokens[2:]], text=text, finish=finish),
        "a missing token": Seen(tokens=tokens[:2] + tokens[3:], text=text, finish=finish),
        "an early end": Seen(tokens=tokens[:-1], text=text, finish=finish),
        "a token too many": Seen(tokens=[*tokens, 7], text=text, finish=finish),
        "other text": Seen(tokens=tokens, text=text + "x", finish=finish),
        "another reason": Seen(tokens=tokens, text=text, finish="length" if finish == "stop" else "stop"),
    }


def test_every_planted_difference_is_found(outcome: Outcome, oracle: Oracle) -> None:
    last = max(outcome.choices)
    for name, bug in planted(outcome.choices[last]).items():
        broken = dataclasses.replace(outcome, choices=outcome.choices | {last: bug})
        assert checks.wrong([broken], oracle.answer), name
    missing = dataclasses.replace(outcome, choices={})
    assert checks.wrong([missing], oracle.answer)
    stranger = dataclasses.replace(outcome, choices=outcome.choices | {9: Seen(tokens=[], text="")})
    assert checks.wrong([stranger], oracle.answer)


def test_an_answer_of_another_request_is_wrong_also_in_part(oracle: Oracle) -> None:
    mine, other = (ask(number, oracle, deadline_s=DEADLINE_S) for number in (0, 12))
    mixed = right(mine, oracle)
    mixed.is_whole, mixed.choices = False, oracle.answer(other.body)
    assert checks.wrong([mixed], oracle.answer)


def test_silence_and_lateness_are_unanswered_and_an_error_in_time_is_not(oracle: Oracle) -> None:
    asked = ask(0, oracle, deadline_s=DEADLINE_S)
    refused = Outcome(ask=asked, started=0.0, ended=1.0, status=503, error="unavailable")
    assert checks.unanswered([right(asked, oracle), refused]) == []
    assert checks.errors([refused]) == {"503 unavailable": 1}
    assert checks.unanswered([Outcome(ask=asked, started=0.0, ended=13.0, overdue=True)])
    assert checks.unanswered([right(asked, oracle, seconds=DEADLINE_S + GRACE_S + 1)])
    assert checks.broken([Outcome(ask=asked, started=0.0, ended=1.0, broken="cut")])


def state(**load: int) -> WorkerState:
    layout = KVLayout(num_blocks=8, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    region = Region(transport="shm", incarnation=1, layout=layout, address={})
    return WorkerState(
        worker="w", incarnation=1, roles=["decode"], status=WorkerStatus.READY, model="tiny", model_fingerprint="",
        tokenizer_fingerprint="", vocab_size=512, max_model_len=512, region=region, **({"free_blocks": 8} | load),
    )  # fmt: skip


@pytest.mark.parametrize(
    "leak", [{"held_blocks": 1}, {"running": 1}, {"waiting": 1}, {"free_blocks": 7}], ids=lambda leak: next(iter(leak))
)
def test_what_a_worker_keeps_is_found(leak: dict[str, int]) -> None:
    assert checks.held([state()], ["w"]) == []
    assert checks.held([state(**leak)], ["w"])
    assert checks.held([], ["w"])  # nor is a worker idle that nobody hears


def test_the_longest_silence_is_of_streams_that_went_on(oracle: Oracle) -> None:
    paused = right(ask(0, oracle, deadline_s=DEADLINE_S), oracle)
    paused.arrivals = [0.0, 1.0, 3.5, 3.6, 9.0]
    assert checks.longest_silence([paused], since=2.0, until=4.0) == pytest.approx(5.4)
    assert checks.longest_silence([paused], since=1.5, until=3.0) == pytest.approx(2.5)
    broken = dataclasses.replace(paused, is_whole=False)
    assert checks.longest_silence([broken], since=0.0, until=9.0) == 0.0


def samples(hold: Callable[[int], float]) -> list[tuple[float, Holdings]]:
    return [(60.0 * minute, {"memory": hold(minute)}) for minute in range(1, 41)]


def test_growth_is_what_it_is_after_the_first_quarter() -> None:
    assert growth(samples(lambda minute: 100 + 0.5 * minute), "memory", 600) == pytest.approx(5)
    assert growth(samples(lambda minute: min(minute, 10)), "memory", 600) == pytest.approx(0)
    assert growth(samples(lambda minute: float(minute > 20)), "memory", 3600) > 1, (
        "one descriptor that never comes back"
    )
    assert growth(samples(lambda minute: 200 - minute), "memory", 600) == pytest.approx(-10)


def test_what_was_never_seen_twice_does_not_grow() -> None:
    assert growth([], "memory", 60) == 0
    assert growth([(1.0, {"memory": 5})], "memory", 60) == 0


def test_what_is_measured_again_replaces_all_of_its_scenario_and_nothing_else() -> None:
    def figures(*names: str) -> list[Result]:
        return [Result(name=name, value=1, unit="count", better="lower") for name in names]

    earlier = figures("soak: requests", "soak: a figure of old", "soak, engine: requests", "cut a - b 1 s: held")
    newer = figures("soak: requests", "soak: another")
    assert merged(earlier, newer) == [*earlier[2:], *newer]
    assert merged([], newer) == newer
