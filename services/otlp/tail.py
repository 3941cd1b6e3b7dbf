"""Tail sampling: which traces are sent is decided when their requests ended, and all processes send the same ones.

The gateway knows at the end whether a request was slow, failed or was moved. It keeps such traces, and says so in its heartbeats.
Of the others a share is sent, chosen by the trace's id, so that every process chooses alike. Until it is known, spans wait here
as they were recorded: what is not sent is never encoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from common.tracing import Span, Tracer

MAX_HELD = 16_384  # spans; beyond them the oldest traces are forgotten
MAX_KEPT = 8192  # traces whose spans are sent from now on: some end after their request


class TailTracer:
    """A `Tracer` in front of another one."""

    def __init__(self, inner: Tracer, *, rest_share: float) -> None:
        self._inner = inner
        self._below = int(rest_share * 2**32)
        self._held: OrderedDict[str, list[Span]] = OrderedDict()
        self._kept: OrderedDict[str, None] = OrderedDict()
        self.held = 0  # spans

    def wants(self, context: str) -> bool:
        return self._inner.wants(context)

    def record(self, span: Span) -> None:
        trace = span.context[3:35]
        if trace in self._kept or int(trace[24:], 16) < self._below:  # the end of an id is random, whoever made it
            self._inner.record(span)
            return
        self._held.setdefault(trace, []).append(span)
        self.held += 1
        while self.held > MAX_HELD:
            self.held -= len(self._held.popitem(last=False)[1])

    def keep(self, traces: Iterable[str]) -> None:
        for trace in traces:
            self._kept[trace] = None
            held = self._held.pop(trace, [])
            self.held -= len(held)
            for span in held:
                self._inner.record(span)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def close(self) -> None:
        self._inner.close()
