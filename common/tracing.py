"""Spans of one request across processes (OpenTelemetry), made after the fact from times that are measured anyway.

Nothing is started or held open on the way of a token: whoever knows when something began and ended records it as a whole, later.
A span's context is a W3C `traceparent`, and travels in every message about a request. Instants are `time.monotonic()` here.
Log lines carry the trace's id: the bus has its handlers run `in_trace` of their message, and tasks begun there are in it, too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, Protocol

import msgspec

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_random = random.Random()  # seeded by the system; ids need to differ, not to be secret
trace_id: ContextVar[str] = ContextVar("baton.trace_id", default="")  # 32 hex digits; see `in_trace`


class SpanEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something at one instant within a span."""

    name: str
    at: float
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that took time. `context` is its own `traceparent`, `parent` and `links` are others'."""

    name: str
    context: str
    parent: str = ""  # "" = the first one of its trace
    began_at: float
    ended_at: float
    attributes: Attributes = {}
    events: Sequence[SpanEvent] = ()
    links: Sequence[str] = ()
    kind: Literal["internal", "server", "consumer"] = "internal"
    error: str = ""  # why it failed; "" = it did not


class Tracer(Protocol):
    """Where spans go."""

    def wants(self, context: str) -> bool:
        """Whether the spans of this trace are recorded here."""

    def record(self, span: Span) -> None:
        """Take a span that ended. Never blocks; drops the oldest ones beyond a bound."""

    def keep(self, traces: Iterable[str]) -> None:
        """These trace ids (32 hex digits) are worth sending, whatever is held back of them. Idempotent."""

    def close(self) -> None:
        """Send what is left; within seconds."""


class NoTracer:
    """Records nothing."""

    def wants(self, context: str) -> bool:
        return False

    def record(self, span: Span) -> None: ...

    def keep(self, traces: Iterable[str]) -> None: ...

    def close(self) -> None: ...


class Children(msgspec.Struct, frozen=True):
    """Records the spans below `parent`; all of them have `attributes`."""

    tracer: Tracer
    parent: str
    attributes: Attributes

    def record(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        attributes: Attributes,
        *,
        context: str = "",  # for whoever told it to others already
        events: Sequence[SpanEvent] = (),
        links: Sequence[str] = (),
        outcome: str = "",
    ) -> None:
        """Record one more. `outcome`: how it went; an error unless `is_failure` says that it is none."""
        span = Span(
            name=name,
            context=context or child_of(self.parent),
            parent=self.parent,
            began_at=began_at,
            ended_at=ended_at,
            attributes={**self.attributes, **attributes},
            events=events,
            links=links,
            error=outcome if is_failure(outcome) else "",
        )
        self.tracer.record(span)


def is_failure(outcome: str) -> bool:
    """Whether something broke. What nobody needs any more is cancelled, which is no error."""
    return outcome not in ("", "ok", "cancelled")


def child_of(context: str) -> str:
    """The context of a new span of the same trace."""
    return f"{context[:36]}{_random.getrandbits(64) | 1:016x}{context[52:]}"


def valid(traceparent: str) -> str:
    """`traceparent` if it is a W3C one, else "": whoever sent it, a client or a process, is not to be trusted."""
    return traceparent if _TRACEPARENT.match(traceparent) else ""


class in_trace:  # noqa: N801 - for `with`; a generator would cost every frame of tokens 1 us more
    """What is logged in here, and by tasks that are begun in here, has the trace's id; none if `traceparent` is none."""

    def __init__(self, traceparent: str | msgspec.UnsetType) -> None:
        self._id = valid(traceparent)[3:35] if traceparent else ""

    def __enter__(self) -> None:
        self._before = trace_id.set(self._id)

    def __exit__(self, *_: object) -> None:
        trace_id.reset(self._before)
