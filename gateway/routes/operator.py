"""Operators' views: health, metrics, and timelines of requests."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from common.errors import InvalidRequestError
from gateway.http.api import JSON, ApiPart, fields, get
from gateway.http.application import Routes
from gateway.http.problem import Problem, json_response, plain_error, takes_gzip
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.pod_metrics import PodMetrics
from gateway.observe.tenant_metrics import TenantMetrics
from gateway.request.refused import Refusals
from gateway.request.spec import Generations
from gateway.request.timeline import MAX_RECENT

MAX_REQUEST_ID_CHARS = 200
DEFAULT_LIMIT = "32"  # timelines shown in each list
PROMETHEUS = "text/plain; version=0.0.4"
OPEN_METRICS = "application/openmetrics-text"

FindElsewhere = Callable[[str], Awaitable[list[dict[str, Any]]]]
_VARY = "accept, accept-encoding"
_SUMMARIES = {
    "/health": ("This process answers.", JSON),
    "/ready": ("Whether a request would be served now.", JSON),
    "/metrics": ("Prometheus text, or OpenMetrics to who asks for it.", PROMETHEUS, OPEN_METRICS),
    "/metrics/pod": ("The whole Baton as one pod, for endpoint pickers.", PROMETHEUS),
    "/version": ("Baton's version.", JSON),
    "/debug/requests": ("Where the time of recent requests went.", JSON),
    "/debug/requests/{request_id}": ("Every choice of one answer.", JSON),
}
_TEXT: dict[str, Any] = {"type": "string"}
_ANSWERS = {
    "/health": fields({"status": _TEXT}),
    "/ready": fields(
        {
            "status": _TEXT,
            "workers": {"type": "object", "additionalProperties": {"type": "integer"}},
            "gateway": _TEXT,
        }
    ),
    "/version": fields({"version": _TEXT}),
    "/debug/requests/{request_id}": fields({"requests": {"type": "array", "items": {"type": "object"}}}),
}
_QUERIES = {
    "/debug/requests": ({"name": "limit", "in": "query", "schema": {"type": "string", "pattern": "^[0-9]{1,4}$"}},)
}


class OperatorRoutes:
    """The routes. `elsewhere` finds timelines at other gateways."""

    def __init__(
        self,
        generations: Generations,
        metrics: GatewayMetrics,
        tenant_metrics: TenantMetrics,
        *,
        version: str,
        gateway_id: str,
        refusals: Refusals,
        elsewhere: FindElsewhere | None = None,
    ) -> None:
        self._generations = generations
        self._metrics = metrics
        self._tenant_metrics = tenant_metrics
        self._version = version
        self._gateway_id = gateway_id
        self._refusals = refusals
        self._elsewhere = elsewhere
        self.routes = Routes(
            gets={
                "/health": self.health,
                "/ready": self.ready,
                "/metrics": self.metrics,
                "/metrics/pod": self.pod_metrics,
                "/version": self.version,
                "/debug/requests": self.timelines,
                "/debug/requests/{request_id}": self.timeline,
            },
            api=_api(),
        )

    async def health(self, request: Request) -> Response:
        """Answer that this process is alive."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report if a request would be served now, and why not."""
        reason, differences = self._generations.not_ready_reason, self._generations.differences
        more: dict[str, Any] = {"gateway": self._gateway_id}
        if differences:
            more["refused"] = {one.worker: one.text for one in differences}
        if reason:
            return json_response({"status": "not ready", "reason": reason} | more, status=503)
        return json_response({"status": "ready", "workers": self._generations.ready_workers} | more)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text, or OpenMetrics on request."""
        await self._tenant_metrics.refresh()
        wanted = [kind.partition(";")[0].strip() for kind in request.headers.get("accept", "").split(",")]
        is_open = OPEN_METRICS in wanted
        text = self._metrics.render(self._generations.loads, as_open_metrics=is_open)
        kind = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8" if is_open else PROMETHEUS
        if not takes_gzip(request):
            return Response(text, media_type=kind, headers={"vary": _VARY})
        packed = await asyncio.to_thread(gzip.compress, text, 5)
        return Response(packed, media_type=kind, headers={"vary": _VARY, "content-encoding": "gzip"})

    async def pod_metrics(self, request: Request) -> Response:
        """The gauges that endpoint pickers read."""
        found = PodMetrics(self._generations.fleet(), self._generations.loads.values(), now=time.time())
        return Response(found.text(), media_type=PROMETHEUS)

    async def version(self, request: Request) -> Response:
        """Baton's version."""
        return json_response({"version": self._version})

    async def timelines(self, request: Request) -> Response:
        """Timelines of recent requests (docs/observability.md)."""
        limit = request.query_params.get("limit", DEFAULT_LIMIT)
        if not (limit.isdecimal() and len(limit) < 5):
            raise InvalidRequestError(f"limit: {limit[:20]!r} is not a number from 0 to 9999", param="limit")
        return json_response(self._generations.timelines.as_json(int(limit)))

    async def timeline(self, request: Request) -> Response:
        """Every choice of one answer, or one of them, at any gateway."""
        wanted = request.path_params["request_id"]
        found = [timeline.as_json() for timeline in self._generations.timelines.find(wanted)]
        if not found and (refused := self._refusals.find(wanted)) is not None:
            found = [refused.as_json()]
        if not found and self._elsewhere is not None and len(wanted) <= MAX_REQUEST_ID_CHARS:
            found = await self._elsewhere(wanted)
        if not found:
            message = f"no recent request {wanted[:100]!r}: each gateway keeps the last {MAX_RECENT}"
            return plain_error(Problem(status=404, message=message))
        return json_response({"requests": found})


def _api() -> ApiPart:
    paths = {
        path: {"get": get(path, *said, query=_QUERIES.get(path, ()), answer=_ANSWERS.get(path))}
        for path, said in _SUMMARIES.items()
    }
    not_ready = fields({"status": _TEXT, "reason": _TEXT, "gateway": _TEXT})
    paths["/ready"]["get"]["responses"]["503"]["content"] = {JSON: {"schema": not_ready}}
    return ApiPart(paths=paths)
