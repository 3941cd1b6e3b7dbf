"""Pieces of an answer to the items and events of a response, however the answer is cut."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.words import Finish
from gateway.answers.answer import Answer, Usage
from gateway.answers.choice import Choice, Piece
from gateway.dialects.responses.custom_input import CustomInput
from gateway.dialects.responses.events import Making, ResponseEvents
from gateway.dialects.responses.output import Called, OutputRules
from gateway.dialects.responses.sealed import COMPACTION, REASONING, unsealed
from gateway.http.problem import Problem
from gateway.parsing.parsed import CallDelta
from tests.examples import examples
from tests.unit.gateway.responses.wire import events_of, text_of

ECHOED = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
RULES = OutputRules(
    called={
        "f": Called(name="f"),
        "ns__g": Called(name="g", namespace="ns"),
        "patch": Called(name="patch", is_custom=True),
    }
)
PATCH = '*** Begin "Patch"\n+a\\b\t🙂\n'
SAID = [
    ("reasoning", "I think of 🙂,\u2028 twice."),
    ("text", 'Let me "see".'),
    ("f", '{"a": [1, "x"]}'),
    ("patch", json.dumps({"input": PATCH})),
    ("ns__g", "{}"),
    ("text", "Done."),
]


class Told:
    """As much of an answer as events need."""

    id, created, model = "resp_0123", 1, "m"

    def usage(self) -> Usage:
        return Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=2, reasoning_tokens=3)


class Speaker:
    """A choice, of which only this is looked at."""

    def __init__(self, *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning


def written(rules: OutputRules = RULES) -> ResponseEvents:
    return ResponseEvents(Making(cast(Answer, Told()), ECHOED, rules), tells_logprobs=rules.logprobs is not None)


def speaker(*, is_reasoning: bool = False) -> Choice:
    return cast(Choice, Speaker(is_reasoning=is_reasoning))


def piece(kind: str, text: str, index: int, *, is_first: bool) -> Piece:
    if kind in ("reasoning", "text"):
        return Piece(text=text if kind == "text" else "", reasoning=text if kind == "reasoning" else "")
    head: dict[str, str] = {"id": f"call_{index}", "name": kind} if is_first else {}
    return Piece(text="", calls=[CallDelta(index=index, arguments=text, **head)])


def stream(said: list[tuple[str, list[str]]], finish: Finish = Finish.STOP, rules: OutputRules = RULES) -> bytes:
    """The stream of an answer, told bit by bit."""
    events, calls = written(rules), -1
    out = [events.opening()]
    for kind, bits in said:
        calls += kind not in ("reasoning", "text")
        for at, bit in enumerate(bits):
            one = piece(kind, bit, calls, is_first=at == 0)
            if kind in ("reasoning", "text") and at:
                out.append(events.text(speaker(is_reasoning=kind == "reasoning"), bit))
            else:
                out.append(events.event(speaker(), one))
    out += [events.event(speaker(), Piece(text="", finish=finish)), events.closing()]
    return b"".join(out)


def whole(said: list[tuple[str, str]], finish: Finish = Finish.STOP, rules: OutputRules = RULES) -> list[Any]:
    return events_of(stream([(kind, [text]) for kind, text in said], finish, rules))


def test_every_kind_of_item_comes_with_its_events_in_order() -> None:
    events = whole(SAID)
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == [
        "reasoning", "message", "function_call", "custom_tool_call", "function_call", "message",
    ]  # fmt: skip
    thought, seen, called, patched, within, done = last["output"]
    assert list(map(text_of, (thought, seen, called, patched, done))) == [
        SAID[0][1], SAID[1][1], SAID[2][1], PATCH, SAID[5][1],
    ]  # fmt: skip
    assert (called["call_id"], called["name"]) == ("call_0", "f")
    assert (within["name"], within["namespace"]) == ("g", "ns")
    assert len({item["id"] for item in last["output"]}) == 6
    assert last["status"] == "completed"
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


@examples(25)
@given(st.data())
def test_an_answer_says_the_same_however_it_is_cut(data: st.DataObject) -> None:
    cut = [(kind, data.draw(bits_of(text))) for kind, text in SAID]
    assert events_of(stream(cut))[-1]["response"]["output"] == whole(SAID)[-1]["response"]["output"]


@st.composite
def bits_of(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.sets(st.integers(1, len(text) - 1), max_size=6)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("kind", ["reasoning", "text", "f", "patch"])
def test_an_answer_that_ran_out_of_tokens_is_incomplete(kind: str) -> None:
    *_, last = whole([("reasoning", "So."), (kind, '{"input": "half')], Finish.LENGTH)
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][-1]["status"] == "incomplete"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    assert [text_of(item) for item in whole([])[-1]["response"]["output"]] == [""]


def test_reasoning_may_be_told_as_its_summary_and_sealed() -> None:
    events = whole(SAID[:2], rules=OutputRules(summarises=True, seals=True))
    item = events[-1]["response"]["output"][0]
    assert (item["summary"], item["content"]) == ([{"type": "summary_text", "text": SAID[0][1]}], [])
    assert unsealed(REASONING, item["encrypted_content"]) == SAID[0][1]
    added = next(event for event in events if event["type"] == "response.output_item.added")
    assert "encrypted_content" not in added["item"]


def test_a_compaction_is_one_item_that_no_delta_tells_of() -> None:
    events = whole(SAID[:2], rules=OutputRules(compacts=True))
    assert [event["type"].removeprefix("response.") for event in events[2:-1]] == [
        "output_item.added",
        "output_item.done",
    ]
    (item,) = events[-1]["response"]["output"]
    assert unsealed(COMPACTION, item["encrypted_content"]) == SAID[1][1]


def test_a_failure_ends_the_stream_with_what_there_was() -> None:
    events = written()
    out = events.opening() + events.event(speaker(), Piece(text="Half a"))
    out += events.failed(Problem(status=429, message="full", code="overloaded"))
    *_, error, last = events_of(out)
    assert (error["type"], error["code"], error["message"]) == ("error", "overloaded", "full")
    assert last["response"]["error"] == {"code": "rate_limit_exceeded", "message": "full"}
    assert [(item["status"], text_of(item)) for item in last["response"]["output"]] == [("incomplete", "Half a")]


def test_what_a_model_calls_and_nobody_offered_is_a_function() -> None:
    (item,) = whole([("unknown", '{"x": 1}')])[-1]["response"]["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "unknown", '{"x": 1}')


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\u00e9\\ud83d\\ude42\\n"}', "aé🙂\n"),
        (' {\n "input" :"x"}', "x"),
        ('{"input": "lone \\ud83d end"}', "lone ? end"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_the_input_of_a_custom_tool_is_read_bit_by_bit(arguments: str, text: str) -> None:
    for size in (1, 2, 5, 100):
        reader = CustomInput()
        bits = [reader.add(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join([*bits, reader.rest()]) == text
