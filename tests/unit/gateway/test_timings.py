"""`timings` of an answer: what they are made from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.answers.answer import Answer
from gateway.dialects.timings import timings_object
from gateway.request.timeline import Timeline


def choice(tokens: int, cached: int, **times: Any) -> Any:
    line = Timeline(request_id="r", received_at=10.0, submitted_at=10.0, prompt_tokens=20)
    for name, value in times.items():
        setattr(line, name, value)
    generation = SimpleNamespace(timeline=line)
    return SimpleNamespace(generation=generation, completion_tokens=tokens, cached_tokens=cached, reasoning_tokens=0)


def answer(*choices: Any) -> Answer:
    return Answer(id="a", model="m", own_model="m", tokenizer=None, choices=list(choices), prompts=[[1] * 20])  # type: ignore[arg-type]


def test_paces_are_of_what_was_computed_and_of_the_tokens_behind_the_first() -> None:
    found = timings_object(answer(choice(5, 12, first_token_at=10.5, ended_at=11.3, phases={"prefill": 160.0})))
    assert found == {
        "cache_n": 12,
        "prompt_n": 8,
        "prompt_ms": 160.0,
        "prompt_per_token_ms": 20.0,
        "prompt_per_second": 50.0,
        "predicted_n": 5,
        "predicted_ms": pytest.approx(800.0),
        "predicted_per_token_ms": pytest.approx(200.0),
        "predicted_per_second": pytest.approx(5.0),
        "ttft_ms": 500.0,
    }


def test_several_choices_are_one_answer() -> None:
    first = choice(3, 12, first_token_at=10.5, ended_at=11.0, phases={"prefill": 160.0})
    second = choice(3, 12, first_token_at=11.0, ended_at=12.5, phases={"prefill": 40.0})
    found = timings_object(answer(first, second))
    assert (found["cache_n"], found["predicted_n"], found["prompt_ms"]) == (12, 6, 160.0)
    assert found["predicted_ms"] == pytest.approx(2000.0)
    assert found["predicted_per_token_ms"] == pytest.approx(500.0)


def test_what_is_not_known_yet_is_zero() -> None:
    found = timings_object(answer(choice(0, 0)))
    assert (found["prompt_n"], found["predicted_n"]) == (20, 0)
    assert {found[name] for name in found if name.endswith(("_ms", "_second"))} == {0.0}
