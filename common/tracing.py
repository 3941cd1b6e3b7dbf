"""Spans of one request across processes (OpenTelemetry), made after the fact from times that are measured anyway.

Nothing is started or held open on the way of a token: whoever knows when something began and ended records it as a whole, later.
A span's context is a W3C `traceparent`, and travels in the `Job` and the `Handoff`. Instants are `time.monotonic()` here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]

_random = random.Random()  # seeded by the system; ids need to differ, not to be secret


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
