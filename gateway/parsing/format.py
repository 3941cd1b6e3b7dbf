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
    BODY = "body"  # a response template's field, read as a whole


class CallIds(StrEnum):
    """How ids of calls look, where a model's template is particular about them."""

    OPENAI = "openai"
    MISTRAL = "mistral"  # nine letters and digits
    KIMI = "kimi"  # functions.NAME:INDEX


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
    is_guess: bool = False  # perhaps no call after all: then the text is content
    read: Mapping[str, Any] = field(default_factory=dict)  # a response template's field


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How calls are written, for grammars. `{name}` and `{arguments}` stand for a call's own."""

    call: str
    opens: str = ""  # before the first call
    closes: str = ""  # after the last
    between: str = ""
    argument: str = ""  # one argument, of `{key}` and `{value}`; "": `{arguments}` is JSON
    ends_value: str = ""  # no argument's text contains it
    arguments: str = "json"  # or python, gemma
    is_telling: bool = True  # how a call begins can't be text of an answer
    plain: str = ""  # one that is no call, of messages in parts
    next_part: str = ""  # between two parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """States by name; an answer begins in `start`."""

    name: str
    states: Mapping[str, State]
    start: str = "content"
    turn: str = ""  # the token that begins a message, if the format knows it
    stops: tuple[str, ...] = ()  # tokens that end an answer beside the model's own
    ids: CallIds = CallIds.OPENAI
    wire: Wire | None = None
    opens_reasoning: str = ""  # what begins a block of reasoning, for grammars
    closes_reasoning: str = ""  # what ends it

    @property
    def knows_reasoning(self) -> bool:
        return any(state.means == Means.REASONING for state in self.states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """A block of thoughts before or amid the answer."""

    name: str
    opens: str
    closes: str
    begins_open: bool = False  # models that never write `opens`


def with_reasoning(calls: Format, reasoning: Reasoning) -> Format:
    """A format of calls, and blocks of reasoning in its content. A call's opening token ends a block."""
    content = calls.states["content"]
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
            means=Means.REASONING, exits=(Exit(on=reasoning.closes, to="content"), *openers)
        ),
    }  # fmt: skip
    name = f"{calls.name}+{reasoning.name}" if calls.name else reasoning.name
    start = "reasoning" if reasoning.begins_open else calls.start
    return replace(
        calls,
        name=name,
        states={**calls.states, **blocks},
        start=start,
        opens_reasoning=reasoning.opens,
        closes_reasoning=reasoning.closes,
    )


PLAIN = Format(name="", states={"content": State(means=Means.CONTENT)})
