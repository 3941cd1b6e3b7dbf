"""What is written down: time line, service levels and trace of each request, and counts of events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from common.errors import ServingError
from common.messages import GatewayState
from gateway.observe.attainment import Attainment, ServiceLevels
from gateway.observe.spans import RequestSpans
from gateway.request.active import ActiveRequest
from gateway.request.timeline import Timelines


class Event(NamedTuple):
    """Something that happened to a request of a model; "" is no model in particular."""

    model: str
    name: str  # "placed:<reason>", "retries", "quarantined", ...


class Records:
    """Notes the beginning and the end of requests."""

    def __init__(self, *, spans: RequestSpans, levels: ServiceLevels, clock: Callable[[], float]) -> None:
        self.timelines = Timelines()
        self._spans = spans
        self._attainment = Attainment(levels, started_at=clock())
        self._clock = clock
        self.timelines.on_end(spans.record)

    def started(self, request: ActiveRequest) -> None:
        self.timelines.start(request.timeline)

    def not_started(self, request: ActiveRequest, error: BaseException) -> None:
        """Its first attempt could not be queued: it counts for no service level."""
        self.timelines.end(request.timeline, error=error)

    def ended(self, request: ActiveRequest, error: ServingError | None, *, cancelled: str = "") -> None:
        self.timelines.end(request.timeline, error=error, cancelled=cancelled)
        self._attainment.ended(request, error, self._clock())

    def context_for(self, traceparent: str) -> str:
        return self._spans.context_for(traceparent)

    def heartbeat(self, gateway: str, incarnation: int, requests: Iterable[ActiveRequest]) -> GatewayState:
        """This gateway's heartbeat: running and recently ended requests."""
        now = self._clock()
        state = self._attainment.state(gateway, incarnation, requests, now)
        return msgspec.structs.replace(state, kept_traces=self._spans.kept(now))
