"""Spans of one request across processes (OpenTelemetry), recorded whole after they ended.

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
_random = random.Random()  # ids need to differ, not to be secret
os.register_at_fork(after_in_child=_random.seed)  # workers of one machine are forked of one process
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
    parent: str = ""  # "" = the trace's first span
    began_at: float
    ended_at: float
    attributes: Attributes = {}
    events: Sequence[SpanEvent] = ()
    links: Sequence[str] = ()
    kind: Literal["internal", "server", "consumer"] = "internal"
    error: str = ""  # "" = it did not fail


class Tracer(Protocol):
    """Where spans go."""

    def wants(self, context: str) -> bool:
        """Whether the spans of this trace are recorded here."""

    def parent_of(self, headers: Mapping[str, str]) -> str:
        """The W3C `traceparent` in a caller's headers (names in lower case), or ""."""

    def new_trace(self, share: float) -> str:
        """The context of a new trace's first span; sampled with the probability `share`."""

    def record(self, span: Span) -> None:
        """Take an ended span. Never blocks; drops the oldest ones beyond a bound."""

    def keep(self, traces: Iterable[str]) -> None:
        """Mark traces (32 hex digits) as worth sending although they were held back. Idempotent."""

    def close(self) -> None:
        """Send what is left, within seconds."""


class NoTracer:
    """Records nothing."""

    def wants(self, context: str) -> bool:
        return False

    def parent_of(self, headers: Mapping[str, str]) -> str:
        return valid(headers.get("traceparent", ""))

    def new_trace(self, share: float) -> str:
        return f"00-{_random.getrandbits(128) | 1:032x}-{_random.getrandbits(64) | 1:016x}-00"

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
        context: str = "",  # set if a message already carried it
        events: Sequence[SpanEvent] = (),
        links: Sequence[str] = (),
        outcome: str = "",
    ) -> None:
        """Record one more. `outcome` says how it went; it is an error if `is_failure` says so."""
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
    """Whether something broke. Cancelled work is no error."""
    return outcome not in ("", "ok", "cancelled")


def child_of(context: str) -> str:
    """The context of a new span of the same trace."""
    return f"{context[:36]}{_random.getrandbits(64) | 1:016x}{context[52:]}"


def valid(traceparent: str) -> str:
    """`traceparent` if it is a W3C one, else "": its sender is not trusted."""
    return traceparent if _TRACEPARENT.match(traceparent) else ""


class in_trace:  # noqa: N801 - used with `with`; a generator costs 1 us more per frame
    """Give log lines and tasks begun inside the trace's id, or none."""

    def __init__(self, traceparent: str | msgspec.UnsetType) -> None:
        self._id = valid(traceparent)[3:35] if traceparent else ""

    def __enter__(self) -> None:
        self._before = trace_id.set(self._id)

    def __exit__(self, *_: object) -> None:
        trace_id.reset(self._before)
