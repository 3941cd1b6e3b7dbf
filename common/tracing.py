"""Spans of one request across processes (OpenTelemetry), made after the fact from times that are measured anyway.

Nothing is started or held open on the way of a token: whoever knows when something began and ended records it as a whole, later.
A span's context is a W3C `traceparent`, and travels in the `Job` and the `Handoff`. Instants are `time.monotonic()` of the
recording process. Without `--otlp-endpoint` no OpenTelemetry package is imported, and nothing is recorded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Value = str | bool | int | float | list[str]
Attributes = Mapping[str, Value]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_random = random.Random()  # seeded by the system; ids need to differ, not to be secret


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something at one instant within a span."""

    name: str
    at: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time. `context` is its own `traceparent`, `parent` and `links` are others'."""

    name: str
    context: str
    parent: str = ""  # "" = the first one of its trace
    began_at: float
    ended_at: float
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    links: Sequence[str] = ()
    kind: Literal["internal", "server", "consumer"] = "internal"
    error: str = ""  # why it failed; "" = it did not


class Tracer(Protocol):
    """Where spans go."""

    def wants(self, context: str) -> bool:
        """Whether the spans of this trace are recorded here."""
        ...

    def record(self, span: Span) -> None:
        """Take a span that ended. Never blocks; drops the oldest ones beyond a bound."""
        ...

    def close(self) -> None:
        """Send what is left; within seconds."""
        ...


class NoTracer:
    """Records nothing."""

    def wants(self, context: str) -> bool:
        return False

    def record(self, span: Span) -> None: ...

    def close(self) -> None: ...


def valid(traceparent: str) -> str:
    """The header if it is one, else ""."""
    return traceparent if _TRACEPARENT.match(traceparent) else ""


def new_trace(ratio: float) -> str:
    """The context of a trace's first span; sampled with the probability `ratio`."""
    flags = "01" if _random.random() < ratio else "00"
    return f"00-{_random.getrandbits(128) | 1:032x}-{_random.getrandbits(64) | 1:016x}-{flags}"


def child_of(context: str) -> str:
    """The context of a new span of the same trace."""
    return f"{context[:36]}{_random.getrandbits(64) | 1:016x}{context[52:]}"


def is_sampled(context: str) -> bool:
    """Whether whoever began the trace wants it recorded."""
    return bool(context) and bool(int(context[53:55], 16) & 1)
