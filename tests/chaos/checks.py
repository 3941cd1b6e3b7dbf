"""What must hold of every outcome and of every worker afterwards. Pure: `test_checks.py` shows each one a planted bug."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from common.messages import WorkerState
from tests.chaos.asks import Seen
from tests.chaos.load import GRACE_S, Outcome

Answers = Callable[[dict[str, Any]], dict[int, Seen]]


def wrong(outcomes: Iterable[Outcome], answers: Answers) -> list[str]:
    """Wrong, repeated or missing tokens or text: a whole answer must be the oracle's, a part of one its beginning."""
    found = []
    for outcome in outcomes:
        expected = answers(outcome.ask.body)
        if outcome.is_whole and outcome.choices.keys() != expected.keys():
            found.append(f"{_name(outcome)}: choices {sorted(outcome.choices)}, not {sorted(expected)}")
        for index, seen in outcome.choices.items():
            problem = _difference(seen, expected.get(index), whole=outcome.is_whole)
            if problem:
                found.append(f"{_name(outcome)}, choice {index}: {problem}")
    return found


def _difference(seen: Seen, expected: Seen | None, *, whole: bool) -> str:
    if expected is None:
        return "nobody asked for it"
    if whole and seen == expected:
        return ""
    if whole and seen.tokens == expected.tokens:
        return f"text {seen.text!r} ({seen.finish}), not {expected.text!r} ({expected.finish})"
    if seen.tokens != expected.tokens[: len(seen.tokens)]:
        pairs = zip_longest(seen.tokens, expected.tokens)
        at, pair = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        return f"token {at} of {len(seen.tokens)} is {pair[0]}, not {pair[1]}"
    if whole:
        return f"{len(seen.tokens)} tokens, not {len(expected.tokens)}"
    return "" if expected.text.startswith(seen.text) else f"text {seen.text!r} does not begin {expected.text!r}"


def unanswered(outcomes: Iterable[Outcome]) -> list[str]:
    """Requests without an answer or an explicit error within their deadline."""
    return [
        f"{_name(outcome)}: nothing within {outcome.ended - outcome.started:.1f} s"
        for outcome in outcomes
        if outcome.overdue or outcome.ended - outcome.started > outcome.ask.deadline_s + GRACE_S
    ]


def broken(outcomes: Iterable[Outcome]) -> list[str]:
    """Connections that ended without a word: only a killed gateway may do that."""
    return [f"{_name(outcome)}: {outcome.broken}" for outcome in outcomes if outcome.broken]


def errors(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Explicit errors by status and code."""
    return Counter(f"{outcome.status} {outcome.error}" for outcome in outcomes if outcome.error)


def held(states: Sequence[WorkerState], workers: Iterable[str]) -> list[str]:
    """What idle workers still hold, and workers that nobody hears."""
    found = [f"{worker} is not heard" for worker in set(workers) - {state.worker for state in states}]
    for state in states:
        missing = state.region.layout.num_blocks - state.free_blocks
        left = {"running": state.running, "waiting": state.waiting, "held": state.held_blocks, "not free": missing}
        if any(left.values()):
            found.append(f"{state.worker}: " + ", ".join(f"{name} {count}" for name, count in left.items() if count))
    return found


def longest_silence(outcomes: Iterable[Outcome], since: float, until: float) -> float:
    """The longest time in seconds for which a stream that had begun waited for its next event, in part after `since`.

    Only silences that began before `until` count; streams that broke off don't.
    """
    longest = 0.0
    for outcome in outcomes:
        if outcome.is_whole:
            for before, after in zip(outcome.arrivals, outcome.arrivals[1:], strict=False):
                if after > since and before < until:
                    longest = max(longest, after - before)
    return longest


def _name(outcome: Outcome) -> str:
    return f"request {outcome.ask.number} ({outcome.ask.kind})"
