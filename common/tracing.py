"""Spans of a request across processes (OpenTelemetry), recorded when they end.

So no token waits for a span. A span's context is a W3C `traceparent`, carried by every message about a request. Instants are
`time.monotonic()` here. Handlers run `in_trace` of their message, so log lines and tasks begun there carry the trace's id.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Literal, Protocol

import msgspec

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_random = random.Random()  # ids must be unique, not secret
os.register_at_fork(after_in_child=_random.seed)  # workers of one host are forked from one process
trace_id: ContextVar[str] = ContextVar("baton.trace_id", default="")  # 32 hex digits; see `in_trace`


class SpanEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event within a span."""

    name: str
    at: float
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A timed operation. `context` is its own `traceparent`, `parent` and `links` are others'."""

    name: str
    context: str
    parent: str = ""  # "" = the trace's first span
    began_at: float
    ended_at: float
    attributes: Attributes = {}
    events: Sequence[SpanEvent] = ()
    links: Sequence[str] = ()
    kind: Literal["internal", "server", "consumer"] = "internal"
    error: str = ""  # "" = it did not fail


class Tracer(Protocol):
    """The recorder of spans."""

    def wants(self, context: str) -> bool:
        """True if spans of this trace are recorded here."""

    def parent_of(self, headers: Mapping[str, str]) -> str:
        """The W3C `traceparent` in a caller's headers (names in lower case), or ""."""

    def new_trace(self) -> str:
        """The context of a new trace's root span."""

    def record(self, span: Span) -> None:
        """Take an ended span. Never blocks; drops the oldest ones beyond a bound."""

    def keep(self, traces: Iterable[str]) -> None:
        """Mark held-back traces (32 hex digits) for sending. Idempotent."""

    def close(self) -> None:
        """Send what is queued, within seconds."""


class NoTracer:
    """Records nothing."""

    def wants(self, context: str) -> bool:
        return False

    def parent_of(self, headers: Mapping[str, str]) -> str:
        return valid(headers.get("traceparent", ""))

    def new_trace(self) -> str:
        return f"00-{_random.getrandbits(128) | 1:032x}-{_random.getrandbits(64) | 1:016x}-00"

    def record(self, span: Span) -> None: ...

    def keep(self, traces: Iterable[str]) -> None: ...

    def close(self) -> None: ...


class Children(msgspec.Struct, frozen=True):
    """A recorder of the spans below `parent`; all of them have `attributes`."""

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
        context: str = "",  # given if a message already carried it
        events: Sequence[SpanEvent] = (),
        links: Sequence[str] = (),
        outcome: str = "",
    ) -> None:
        """Record one more span. `outcome` is how it ended; `is_failure` tells if that is an error."""
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
    """True if an outcome is an error. Cancelled work is none."""
    return outcome not in ("", "ok", "cancelled")


def child_of(context: str) -> str:
    """The context of a new child span."""
    return f"{context[:36]}{_random.getrandbits(64) | 1:016x}{context[52:]}"


def valid(traceparent: str) -> str:
    """`traceparent` if it is valid W3C, else "": its sender is not trusted."""
    return traceparent if _TRACEPARENT.match(traceparent) else ""


class in_trace:  # noqa: N801 - used with `with`; a generator costs 1 us more per frame
    """Context manager that gives log lines and new tasks the trace's id, or none."""

    def __init__(self, traceparent: str | msgspec.UnsetType) -> None:
        self._id = valid(traceparent)[3:35] if traceparent else ""

    def __enter__(self) -> None:
        self._before = trace_id.set(self._id)

    def __exit__(self, *_: object) -> None:
        trace_id.reset(self._before)
