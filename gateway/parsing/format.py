"""How a family of models writes reasoning and tool calls: states, and the terminals that lead from one to another.

A format is data. A terminal that is one token of the vocabulary is matched by that token's id alone, any other by its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Means(StrEnum):
    """What a state's text is."""

    CONTENT = "content"
    REASONING = "reasoning"
    DROP = "drop"  # markup
    HEADER = "header"  # read as a whole by the exit's `reads`
    VALUE = "value"  # an argument that a header named, as plain text
    JSON = "json"  # a call's arguments
    JSON_CALLS = "json_calls"  # objects with name and arguments, or a list of them
    PYTHON_CALLS = "python_calls"  # f(a=1), perhaps several and in brackets
    CALLS = "calls"  # either of both
    BODY = "body"  # a response template's field, read as a whole


class CallIds(StrEnum):
    """How ids of calls look, where a model's template is particular about them."""

    OPENAI = "openai"
    MISTRAL = "mistral"  # nine letters and digits
    KIMI = "kimi"  # functions.NAME:INDEX
    SOLAR = "solar"  # ten small letters and digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Where a terminal leads. The first exit of a state that fits is taken."""

    on: str
    to: str
    reads: str = ""  # what a header must match; groups `name`, `id` and `key` are taken
    is_pattern: bool = False  # `on` is a regular expression, whose groups are taken
    calls: bool = False  # leads to tool calls: there only for requests with tools
    first: bool = False  # only before any content
    token_only: bool = False  # only where the terminal is one token
    keeps: bool = False  # the next state reads the terminal as well


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A kind of text and its ways out."""

    means: Means
    exits: tuple[Exit, ...] = ()
    in_call: bool = False  # the call goes on: its name, arguments, and what is between them
    quote: str = ""  # delimits strings beside "
    name_key: str = "name"  # a JSON call's; "": the name is the key of its arguments
    types: frozenset[str] = frozenset()  # a value's, unless the tool's schema says some
    is_guess: bool = False  # perhaps no call after all: then the text is content
    read: Mapping[str, Any] = field(default_factory=dict)  # a response template's field


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How calls are written, for grammars. `{name}` and `{arguments}` stand for a call's own, `{index}` and `{id}` for any."""

    call: str
    opens: str = ""  # before the first call
    closes: str = ""  # after the last
    between: str = ""
    argument: str = ""  # one argument, of `{key}`, `{value}` and `{is_text}`; "": `{arguments}` is JSON
    ends_value: str = ""  # no argument's text contains it
    arguments: str = "json"  # or python, gemma
    is_telling: bool = True  # how a call begins can't be text of an answer
    plain: str = ""  # content, where it has a head of its own
    next_part: str = ""  # between two parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """States by name; an answer begins in `start`."""

    name: str  # the calls'; "": it has none
    reasoning: str = ""  # the name of its thoughts
    states: Mapping[str, State]
    start: str = "content"
    turn: str = ""  # the token that begins a message, if the format knows it
    stops: tuple[str, ...] = ()  # tokens that end an answer beside the model's own
    ids: CallIds = CallIds.OPENAI
    wire: Wire | None = None
    opens_reasoning: str = ""  # what begins a block of reasoning, for grammars
    closes_reasoning: str = ""  # what ends it

    @property
    def is_in_parts(self) -> bool:
        """Whether content has a head of its own."""
        return self.wire is not None and bool(self.wire.plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """A block of thoughts before or amid the answer."""

    name: str
    opens: str
    closes: str
    begins_open: bool = False  # models that never write `opens`
    answer: tuple[str, str] | None = None  # the tags that the rest may stand in


def opens(on: str, to: str, *, first: bool = False, keeps: bool = False) -> Exit:
    """Where calls begin."""
    return Exit(on=on, to=to, calls=True, first=first, keeps=keeps)


def content(*exits: Exit) -> State:
    return State(means=Means.CONTENT, exits=exits)


def markup(*exits: Exit, in_call: bool = False) -> State:
    return State(means=Means.DROP, exits=exits, in_call=in_call)


def header(*exits: Exit, in_call: bool = False) -> State:
    return State(means=Means.HEADER, exits=exits, in_call=in_call)


def value(*exits: Exit, types: frozenset[str] = frozenset()) -> State:
    return State(means=Means.VALUE, exits=exits, in_call=True, types=types)


def arguments(*exits: Exit, quote: str = "") -> State:
    """A call's arguments as JSON."""
    return State(means=Means.JSON, exits=exits, in_call=True, quote=quote)


def json_calls(*exits: Exit, name_key: str = "name") -> State:
    return State(means=Means.JSON_CALLS, exits=exits, name_key=name_key)


def with_reasoning(calls: Format, reasoning: Reasoning) -> Format:
    """A format of calls, and blocks of reasoning in its content. A call's opening token ends a block."""
    states = _with_answer(calls.states, *reasoning.answer) if reasoning.answer else calls.states
    content = states["content"]
    openers = tuple(replace(one, token_only=True, first=False) for one in content.exits if one.calls and not one.first)
    blocks = {
        "content": replace(
            content,
            exits=(
                Exit(on=reasoning.opens, to="reasoning", first=True),
                Exit(on=reasoning.opens, to="reasoning", token_only=True),
                Exit(on=reasoning.closes, to="content", token_only=True),  # nobody opened it
                *content.exits,
            ),
        ),
        "reasoning": State(
            means=Means.REASONING, exits=(Exit(on=reasoning.closes, to="reasoned" if reasoning.answer else "content"), *openers)
        ),
    }  # fmt: skip
    start = "reasoning" if reasoning.begins_open else calls.start
    return replace(
        calls,
        reasoning=reasoning.name,
        states={**states, **blocks},
        start=start,
        opens_reasoning=reasoning.opens,
        closes_reasoning=reasoning.closes,
    )


def _with_answer(states: Mapping[str, State], opens: str, closes: str) -> dict[str, State]:
    """States for an answer in tags behind its reasoning. Elsewhere the tags are text."""
    inside = {
        f"{name} of the answer": replace(
            state, exits=tuple(replace(one, to=f"{one.to} of the answer") for one in state.exits)
        )
        for name, state in states.items()
    }
    said = inside["content of the answer"]
    inside["content of the answer"] = replace(said, exits=(Exit(on=closes, to="content"), *said.exits))
    begins = Exit(on=opens, to="content of the answer", first=True)
    return {**states, **inside, "reasoned": replace(states["content"], exits=(begins, *states["content"].exits))}


PLAIN = Format(name="", states={"content": State(means=Means.CONTENT)})
