"""The output items of an answer: the events of each while it grows, and its final form."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.messages import TokenLogprobs
from common.words import Finish
from gateway.answers.choice import Piece
from gateway.dialects.responses.custom_input import CustomInput
from gateway.dialects.responses.sealed import COMPACTION, REASONING, sealed
from gateway.http.problem import Json
from gateway.parsing.parsed import CallDelta

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class Event(NamedTuple):
    """One event of a stream, without its number."""

    type: str
    fields: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A tool under the client's name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # the input is text

    @property
    def named(self) -> Json:
        """The fields that name a call."""
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """Rules for presenting an answer."""

    called: Mapping[str, Called] = field(default_factory=dict)  # by the model's names of them
    summarises: bool = False  # reasoning is returned as its summary
    seals: bool = False  # reasoning is also returned in `encrypted_content`
    compacts: bool = False  # the answer's text is the compacted conversation
    logprobs: Callable[[Sequence[int], Sequence[TokenLogprobs]], list[Json]] | None = None


class OpenItem(Protocol):
    """An item in progress. Each method except `item` returns events."""

    def begin(self) -> list[Event]: ...
    def add(self, text: str, logprobs: list[Json]) -> list[Event]: ...
    def end(self, status: str) -> list[Event]: ...
    def item(self, status: str) -> Json: ...


class Output:
    """An answer's items, built from its pieces in order."""

    def __init__(self, answer_id: str, rules: OutputRules) -> None:
        """`answer_id`: "resp_" and hex digits, from which the items' ids are derived."""
        self.finish = Finish.NONE
        self._suffix = answer_id.partition("_")[2]
        self._rules = rules
        self._items: list[Json] = []
        self.open_item: OpenItem | None = None
        self._call = -1  # index of the open call in the answer
        self._logprobs: list[Json] = []  # tokens whose text is still held back

    def items(self, status: str = INCOMPLETE) -> list[Json]:
        """Return the items so far. `status`: that of the open item."""
        return [*self._items, self.open_item.item(status)] if self.open_item is not None else list(self._items)

    def writing(self, *, reasoning: bool) -> Text | None:
        """The open item, if its text continues."""
        found = self.open_item
        return found if isinstance(found, Text) and found.form.is_reasoning is reasoning else None

    def take(self, piece: Piece) -> list[Event]:
        """Return the events of a piece."""
        events: list[Event] = []
        logprobs = self._scored(piece)
        going_on, begun = piece.calls_around
        for call in going_on:
            events += self._called(call)
        if piece.reasoning:
            events += self._said(piece.reasoning, [], is_reasoning=True)
        if piece.text:
            events += self._said(piece.text, logprobs, is_reasoning=False)
        for call in begun:
            events += self._called(call)
        if piece.finish:
            self.finish = piece.finish
            events += self._end(INCOMPLETE if piece.finish == Finish.LENGTH else COMPLETED)
        return events

    def _scored(self, piece: Piece) -> list[Json]:
        """Logprobs of a piece's text: those of its tokens, since others may be markup, or become text later."""
        if self._rules.logprobs is None:
            return []
        waiting = self._logprobs + self._rules.logprobs(piece.token_ids, piece.logprobs)
        if not piece.text:
            self._logprobs = [] if piece.reasoning or piece.calls else waiting
            return []
        text, told = piece.text.encode(), b"".join(bytes(one["bytes"]) for one in waiting)
        begin = max(0, told.rfind(text))
        ends = list(itertools.accumulate(len(one["bytes"]) for one in waiting))
        first = sum(end <= begin for end in ends)
        behind = 1 + sum(end < begin + len(text) for end in ends)
        self._logprobs = waiting[behind:]
        return waiting[first:behind]

    def _said(self, text: str, logprobs: list[Json], *, is_reasoning: bool) -> list[Event]:
        events: list[Event] = []
        if self._rules.compacts:
            if is_reasoning:
                return []
            if not isinstance(self.open_item, Compaction):
                events += self._begin(Compaction(self._place("cmp")))
        elif self.writing(reasoning=is_reasoning) is None:
            events += self._begin(self._text(is_reasoning=is_reasoning))
        assert self.open_item is not None
        return events + self.open_item.add(text, logprobs)

    def _text(self, *, is_reasoning: bool) -> Text:
        if not is_reasoning:
            return Text(self._place("msg"), MESSAGE, seals=False)
        return Text(self._place("rs"), SUMMARY if self._rules.summarises else THOUGHTS, seals=self._rules.seals)

    def _called(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.index != self._call or not isinstance(self.open_item, Call):
            self._call = delta.index
            called = self._rules.called.get(delta.name) or Called(name=delta.name)
            events += self._begin(Call(self._place("ctc" if called.is_custom else "fc"), called, delta.id))
        assert self.open_item is not None
        return events + self.open_item.add(delta.arguments, []) if delta.arguments else events

    def _place(self, kind: str) -> Place:
        """The next item's place, after the open one."""
        index = len(self._items) + (self.open_item is not None)
        return Place(f"{kind}_{self._suffix}{index:04x}", index)

    def _begin(self, item: OpenItem) -> list[Event]:
        events = self._end(COMPLETED)
        self.open_item = item
        return events + item.begin()

    def _end(self, status: str) -> list[Event]:
        events: list[Event] = []
        if self.finish and self.open_item is None and not self._items:  # the model generated nothing
            self.open_item = Compaction(self._place("cmp")) if self._rules.compacts else self._text(is_reasoning=False)
            events += self.open_item.begin()
        if self.open_item is not None:
            events += self.open_item.end(status)
            self._items.append(self.open_item.item(status))
            self.open_item = None
        return events


@dataclass(frozen=True, slots=True)
class Place:
    """An item's id, and its index among the answer's items."""

    id: str
    index: int

    @property
    def fields(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}


def _added(place: Place, item: Json) -> Event:
    return Event("response.output_item.added", {"output_index": place.index, "item": item})


def _done(place: Place, item: Json) -> Event:
    return Event("response.output_item.done", {"output_index": place.index, "item": item})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """The form of an item's single text part."""

    is_reasoning: bool
    event: str  # prefix of its events' types
    part_event: str
    index: str  # the field that counts its parts
    part: str  # the part's type

    def told(self, text: str, logprobs: list[Json]) -> Json:
        more = {} if self.is_reasoning else {"annotations": [], "logprobs": logprobs}
        return {"type": self.part, "text": text} | more


MESSAGE = TextForm(
    is_reasoning=False,
    event="response.output_text",
    part_event="response.content_part",
    index="content_index",
    part="output_text",
)
THOUGHTS = TextForm(
    is_reasoning=True,
    event="response.reasoning_text",
    part_event="response.content_part",
    index="content_index",
    part="reasoning_text",
)
SUMMARY = TextForm(
    is_reasoning=True,
    event="response.reasoning_summary_text",
    part_event="response.reasoning_summary_part",
    index="summary_index",
    part="summary_text",
)


class Text:
    """A message, or reasoning: a single text part."""

    def __init__(self, place: Place, form: TextForm, *, seals: bool) -> None:
        self.place = place
        self.form = form
        self.parts: list[str] = []
        self._logprobs: list[Json] = []
        self._seals = seals
        self._fields = place.fields | {form.index: 0}

    def begin(self) -> list[Event]:
        part = self.form.told("", [])
        empty = self._told([], IN_PROGRESS)
        return [_added(self.place, empty), Event(f"{self.form.part_event}.added", self._fields | {"part": part})]

    def add(self, text: str, logprobs: list[Json]) -> list[Event]:
        self.parts.append(text)
        self._logprobs += logprobs
        scored = {} if self.form.is_reasoning else {"logprobs": logprobs}
        return [Event(f"{self.form.event}.delta", self._fields | {"delta": text} | scored)]

    def end(self, status: str) -> list[Event]:
        text = "".join(self.parts)
        scored = {} if self.form.is_reasoning else {"logprobs": self._logprobs}
        part = self.form.told(text, self._logprobs)
        return [
            Event(f"{self.form.event}.done", self._fields | {"text": text} | scored),
            Event(f"{self.form.part_event}.done", self._fields | {"part": part}),
            _done(self.place, self.item(status)),
        ]

    def item(self, status: str) -> Json:
        return self._told([self.form.told("".join(self.parts), self._logprobs)], status)

    def _told(self, parts: list[Json], status: str) -> Json:
        if not self.form.is_reasoning:
            return {"id": self.place.id, "type": "message", "role": "assistant", "status": status, "content": parts}
        is_summary = self.form is SUMMARY
        item: Json = {"id": self.place.id, "type": "reasoning", "summary": parts if is_summary else []}
        item |= {"content": [] if is_summary else parts, "status": status}
        return item | ({"encrypted_content": sealed(REASONING, "".join(self.parts))} if self._seals and parts else {})


class Call:
    """A function call with JSON arguments, or a custom tool call with a text input."""

    def __init__(self, place: Place, called: Called, call_id: str) -> None:
        self._place = place
        self._called = called
        self._call_id = call_id
        self._parts: list[str] = []
        self._input = CustomInput() if called.is_custom else None
        self._event, self._name = (
            ("response.custom_tool_call_input", "input")
            if called.is_custom
            else ("response.function_call_arguments", "arguments")
        )

    def begin(self) -> list[Event]:
        return [_added(self._place, self.item(IN_PROGRESS))]

    def add(self, text: str, logprobs: list[Json]) -> list[Event]:
        return self._say(text if self._input is None else self._input.add(text))

    def end(self, status: str) -> list[Event]:
        rest = self._say("" if self._input is None else self._input.rest())
        said = self._place.fields | {self._name: "".join(self._parts)}
        named = {} if self._called.is_custom else {"name": self._called.name}
        return [*rest, Event(f"{self._event}.done", said | named), _done(self._place, self.item(status))]

    def item(self, status: str) -> Json:
        kind = "custom_tool_call" if self._called.is_custom else "function_call"
        head = {"id": self._place.id, "type": kind, "status": status, "call_id": self._call_id}
        return head | self._called.named | {self._name: "".join(self._parts)}

    def _say(self, text: str) -> list[Event]:
        if not text:
            return []
        self._parts.append(text)
        return [Event(f"{self._event}.delta", self._place.fields | {"delta": text})]


class Compaction:
    """A compaction in progress: nothing is sent before it is complete."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._parts: list[str] = []

    def begin(self) -> list[Event]:
        return [_added(self._place, self.item(IN_PROGRESS))]

    def add(self, text: str, logprobs: list[Json]) -> list[Event]:
        self._parts.append(text)
        return []

    def end(self, status: str) -> list[Event]:
        return [_done(self._place, self.item(status))]

    def item(self, status: str) -> Json:
        return {
            "id": self._place.id,
            "type": "compaction",
            "encrypted_content": sealed(COMPACTION, "".join(self._parts)),
        }
