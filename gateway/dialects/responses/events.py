"""A streamed response: its events in order, numbered from 0."""

from __future__ import annotations

import time
from collections.abc import Iterable

from common.words import Finish
from gateway.answers.answer import Answer
from gateway.answers.choice import Choice, Piece
from gateway.dialects.responses import objects
from gateway.dialects.responses.objects import Head, error_of, response_object
from gateway.dialects.responses.output import Event, Output, OutputRules, Text
from gateway.http.problem import Json, Problem
from gateway.http.streaming import said

NUM_QUEUED = 2


class Making:
    """A response in progress: the object at each stage. `echoed`: fields repeated from the body."""

    def __init__(self, answer: Answer, echoed: Json, rules: OutputRules) -> None:
        self.output = Output(answer.id, rules)
        self._echoed = echoed
        self._answer = answer
        self._head = Head.of(answer)
        self._ended: Json | None = None

    def not_kept(self) -> None:
        """The event of a response that could not be stored."""
        self._echoed = self._echoed | {"store": False}
        self._ended = None

    def took(self, choice: Choice, piece: Piece) -> None:
        """Take a piece of an unstreamed answer."""
        self.output.take(piece)

    def begun(self, status: str = objects.IN_PROGRESS) -> Json:
        return response_object(self._head, self._echoed, status=status)

    def ended(self) -> Json:
        """The object after all pieces were taken."""
        if self._ended is None:
            status = objects.INCOMPLETE if self.output.finish == Finish.LENGTH else objects.COMPLETED
            completed_at = int(time.time()) if status == objects.COMPLETED else None
            self._ended = self._told(status, completed_at=completed_at)
        return self._ended

    def failed(self, problem: Problem) -> Json:
        return self._told(objects.FAILED, error=error_of(problem))

    def cancelled(self) -> Json:
        return self._told(objects.CANCELLED)

    def _told(self, status: str, *, error: Json | None = None, completed_at: int | None = None) -> Json:
        usage, items = self._answer.usage(), self.output.items()
        return response_object(
            self._head, self._echoed, status=status, output=items, usage=usage, error=error, completed_at=completed_at
        )


class ResponseEvents:
    """The bytes of a stream. Most events add text to the open item: the JSON around it is made once an item."""

    def __init__(self, making: Making, *, tells_logprobs: bool, was_queued: bool = False) -> None:
        """`was_queued`: the events of `queued` were sent before."""
        self.making = making
        self.tell_text_alone = not tells_logprobs
        self._was_queued = was_queued
        self._next = NUM_QUEUED if was_queued else 0  # number of the next event
        self._latest: Text | None = None
        self._reasons = False  # the latest item is reasoning
        self._before, self._between, self._behind = "", "", b""  # the JSON of its deltas, around number and text

    def opening(self) -> bytes:
        begun = self.making.begun()
        statuses = ("in_progress",) if self._was_queued else ("created", "in_progress")
        return self._told(Event(f"response.{status}", {"response": begun}) for status in statuses)

    def text(self, choice: Choice, text: str) -> bytes:
        item = self._latest
        if item is None or item is not self.making.output.open_item or choice.is_reasoning is not self._reasons:
            return self._begun(choice, text)
        item.parts.append(text)
        number = self._next
        self._next = number + 1
        return f"{self._before}{number}{self._between}".encode() + said(text) + self._behind

    def _begun(self, choice: Choice, text: str) -> bytes:
        """The event of the first text in an item."""
        told = self.event(choice, Piece(text="", reasoning=text) if choice.is_reasoning else Piece(text=text))
        self._reasons = choice.is_reasoning
        self._latest = item = self.making.output.writing(reasoning=self._reasons)
        if item is not None:
            self._before, self._between, self._behind = _around(item)
        return told

    def event(self, choice: Choice, piece: Piece) -> bytes:
        return self._told(self.making.output.take(piece))

    def closing(self) -> bytes:
        ended = self.making.ended()
        return self._told([Event(f"response.{ended['status']}", {"response": ended})])

    def failed(self, problem: Problem) -> bytes:
        """The events of a failure: the error with our own code, and the failed response."""
        error = {"code": problem.code or None, "message": problem.message, "param": problem.param}
        failed = {"response": self.making.failed(problem)}
        return self._told([Event("error", error), Event("response.failed", failed)])

    def _told(self, events: Iterable[Event]) -> bytes:
        told = [encoded(event, number) for number, event in enumerate(events, self._next)]
        self._next += len(told)
        return b"".join(told)


def queued(told: Json) -> bytes:
    """The first events of a queued background response: as many as `NUM_QUEUED`."""
    events = (Event(f"response.{status}", {"response": told}) for status in ("created", "queued"))
    return b"".join(encoded(event, number) for number, event in enumerate(events))


def encoded(event: Event, number: int) -> bytes:
    """A server-sent event. Clients dispatch on its name, or on the same type in its data."""
    data = said({"type": event.type, "sequence_number": number} | event.fields)
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), data)


def _around(item: Text) -> tuple[str, str, bytes]:
    """The JSON of a delta: before its number, between that and the text, and after."""
    number, mark = 9_007_199_254_740_991, "\N{OBJECT REPLACEMENT CHARACTER}"
    fields = item.place.fields | {item.form.index: 0, "delta": mark}
    if not item.form.is_reasoning:
        fields["logprobs"] = []
    event = encoded(Event(f"{item.form.event}.delta", fields), number)
    before, _, rest = event.partition(b"%d" % number)
    between, _, behind = rest.partition(said(mark))
    return before.decode(), between.decode(), behind
