"""The output format of a model family: states, and the terminals that lead from one to another.

A format is data. A terminal that is one token of the vocabulary is matched by that token's id alone, any other by its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Means(StrEnum):
    """The meaning of a state's text."""

    CONTENT = "content"
    REASONING = "reasoning"
    DROP = "drop"  # markup
    HEADER = "header"  # parsed as a whole by the exit's `reads`
    VALUE = "value"  # an argument named by a header, as plain text
    JSON = "json"  # a call's arguments
    JSON_CALLS = "json_calls"  # objects with name and arguments, or a list of them
    PYTHON_CALLS = "python_calls"  # f(a=1), possibly several, in brackets
    CALLS = "calls"  # either of the two
    BODY = "body"  # a response template's field, parsed as a whole


class CallIds(StrEnum):
    """The form of call ids, for templates that require one."""

    OPENAI = "openai"
    MISTRAL = "mistral"  # nine letters and digits
    KIMI = "kimi"  # functions.NAME:INDEX
    SOLAR = "solar"  # ten lower-case letters and digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A transition by a terminal. The first matching exit of a state is taken."""

    on: str
    to: str
    reads: str = ""  # pattern of a header, with groups `name`, `id` and `key`
    is_pattern: bool = False  # `on` is a regular expression with groups
    calls: bool = False  # leads to tool calls: only for requests with tools
    first: bool = False  # only before any content
    token_only: bool = False  # only if the terminal is a single token
    keeps: bool = False  # the next state reads the terminal as well


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A kind of text and its exits."""

    means: Means
    exits: tuple[Exit, ...] = ()
    in_call: bool = False  # the call continues: its name, arguments, and text in between
    quote: str = ""  # delimits strings, in addition to "
    name_key: str = "name"  # a JSON call's; "": the name is the key of its arguments
    types: frozenset[str] = frozenset()  # a value's, unless the tool's schema has some
    is_guess: bool = False  # may turn out to be no call: then the text is content
    read: Mapping[str, Any] = field(default_factory=dict)  # a response template's field


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The syntax of calls, for grammars. `{name}` and `{arguments}` are the call's own, `{index}` and `{id}` arbitrary."""

    call: str
    opens: str = ""  # before the first call
    closes: str = ""  # after the last
    between: str = ""
    argument: str = ""  # one argument, with `{key}`, `{value}` and `{is_text}`; "": `{arguments}` is JSON
    ends_value: str = ""  # cannot occur in an argument's text
    arguments: str = "json"  # or python, gemma
    is_telling: bool = True  # the start of a call can't be text of an answer
    plain: str = ""  # content, where it has its own header
    next_part: str = ""  # between two parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """States by name; an answer starts in `start`."""

    name: str  # the calls' name; "": none
    reasoning: str = ""  # the name of its reasoning
    states: Mapping[str, State]
    start: str = "content"
    turn: str = ""  # the token that starts a message, if known
    stops: tuple[str, ...] = ()  # tokens that end an answer, in addition to the model's own
    ids: CallIds = CallIds.OPENAI
    wire: Wire | None = None
    opens_reasoning: str = ""  # start of a block of reasoning, for grammars
    closes_reasoning: str = ""  # its end

    @property
    def is_in_parts(self) -> bool:
        """True if content has its own header."""
        return self.wire is not None and bool(self.wire.plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """A block of reasoning before or within the answer."""

    name: str
    opens: str
    closes: str
    begins_open: bool = False  # models that never write `opens`
    answer: tuple[str, str] | None = None  # tags that may enclose the rest


def opens(on: str, to: str, *, first: bool = False, keeps: bool = False) -> Exit:
    """The start of calls."""
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
    """A format of calls, with blocks of reasoning in its content. A call's opening token ends a block."""
    states = _with_answer(calls.states, *reasoning.answer) if reasoning.answer else calls.states
    content = states["content"]
    openers = tuple(replace(one, token_only=True, first=False) for one in content.exits if one.calls and not one.first)
    blocks = {
        "content": replace(
            content,
            exits=(
                Exit(on=reasoning.opens, to="reasoning", first=True),
                Exit(on=reasoning.opens, to="reasoning", token_only=True),
                Exit(on=reasoning.closes, to="content", token_only=True),  # without an opening token
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
    """States for an answer in tags after its reasoning. Elsewhere the tags are text."""
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
