"""The HTTP application: its routes' table, the envelope of every answer, and what status each error becomes."""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Protocol

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from common.errors import QuarantinedError, RateLimitedError, ServingError
from common.tracing import NoTracer, Tracer
from gateway.admission import RefusedError
from gateway.batches.routes import BatchRoutes
from gateway.budgets import Budgets, LocalBudgets
from gateway.connection import MAX_HEAD_BYTES
from gateway.console.control import FleetControl
from gateway.console.routes import ConsoleFacts, ConsoleRoutes
from gateway.dialect import Dialect
from gateway.fleet_metrics import FleetMetrics
from gateway.generation import Generations
from gateway.metrics import GatewayMetrics
from gateway.request_metrics import RequestMetrics
from gateway.responses import error_code, error_response, error_status
from gateway.routes import VERSION, Endpoint, HttpSettings, Routes
from gateway.spans import TraceRequests
from gateway.tenant_metrics import TenantLabels, TenantMetrics
from gateway.tenants import ADMIN_PATHS, OPERATOR_PATHS, Tenant, Tenants, is_open, is_under
from gateway.tokenizer import ChatTokenizer

__all__ = ["HttpSettings", "create_app"]

log = logging.getLogger("baton.http")

REFUSALS = (429, 503)  # the statuses that say when to come back
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")


def create_app(
    *,
    generations: Generations,
    tokenizer: ChatTokenizer,
    settings: HttpSettings,
    registry: CollectorRegistry | None = None,
    tracer: Tracer | None = None,
    budgets: Budgets | None = None,
    control: FleetControl | None = None,
    batches: Callable[[Dialect, GatewayMetrics], BatchRoutes] | None = None,
) -> FastAPI:
    """Build the application. It owns no connection: start and stop `generations` around it.

    Tenants' budgets are counted by `budgets`, by default in this process alone. Metrics go to `registry`, by default one of the
    application's own, which `/metrics` shows. Other gateways are asked, and answered, through `control`: without it there is no
    console. There is a Batch API where there is `batches`, which makes its routes.
    """
    app = FastAPI(title="Baton", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    budgets = budgets or LocalBudgets()
    dialect = Dialect(
        generations=generations,
        tokenizer=tokenizer,
        budgets=budgets,
        served_model=settings.served_model,
        default_deadline_s=settings.request_timeout_s,
    )
    labels = TenantLabels()
    metrics = GatewayMetrics(settings.served_model, registry, tenants=labels)
    generations.timelines.on_end(RequestMetrics(settings.served_model, metrics.registry, settings.levels).observe)
    tenants = settings.tenants  # read at each use: its file may be read again
    tenant_metrics = TenantMetrics(
        settings.served_model,
        metrics.registry,
        workers=lambda: generations.fleet,
        budgets=budgets,
        limits=lambda: tenants.limits,
        labels=labels,
    )
    generations.timelines.on_end(tenant_metrics.observe)
    FleetMetrics(lambda: generations.fleet).register(metrics.registry)
    elsewhere = control.find if control is not None else None
    routes = Routes(dialect, metrics, settings, tenant_metrics, elsewhere, has_batches=batches is not None)
    app.add_exception_handler(ServingError, _on_serving_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(Envelope, tenants=settings.tenants, on_refused=metrics.told_refusal)
    app.add_middleware(TraceRequests, tracer=tracer or NoTracer(), share=settings.trace_share)  # around the envelope
    _add(app, routes.gets, routes.posts)
    if batches is not None:
        found = batches(dialect, metrics)
        _add(app, found.gets, found.posts, found.deletes)
    if control is not None:
        console = ConsoleRoutes(control, generations, tenant_metrics, _facts(settings))
        if settings.console:
            _add(app, console.gets, console.posts)
    return app


def _add(
    app: FastAPI,
    gets: Mapping[str, Endpoint],
    posts: Mapping[str, Endpoint],
    deletes: Mapping[str, Endpoint] = MappingProxyType({}),
) -> None:
    for path, endpoint in deletes.items():
        app.add_route(path, endpoint, methods=["DELETE"])
    for path, endpoint in posts.items():
        app.add_route(path, endpoint, methods=["POST"])
    for path, endpoint in gets.items():
        app.add_route(path, endpoint, methods=["GET"])  # and HEAD


def _facts(settings: HttpSettings) -> ConsoleFacts:
    tenants = settings.tenants  # its keys are read at each use: they may be reloaded
    return ConsoleFacts(
        gateway_id=settings.gateway_id,
        served_model=settings.served_model,
        version=VERSION,
        levels=settings.levels,
        has_admin=lambda: tenants.keys.has_admin,
    )


class RefusalTold(Protocol):
    """Takes the seconds from a request's last byte to the last byte of its refusal."""

    def __call__(self, seconds: float, *, waited: bool) -> None: ...


class Envelope:
    """What holds for every answer: a request id, a key where one is configured, an error object even for a crash.

    Plain ASGI: streams pass untouched.
    """

    def __init__(self, app: ASGIApp, *, tenants: Tenants, on_refused: RefusalTold) -> None:
        self._app = app
        self._tenants = tenants
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.match(asked) else uuid.uuid4().hex
        started = is_refusal = False

        async def send_with_id(message: AsgiMessage) -> None:
            nonlocal started, is_refusal
            if message["type"] == "http.response.start":
                started = True
                is_refusal = message["status"] in REFUSALS and scope["path"].startswith("/v1/")
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)
            if is_refusal and message["type"] == "http.response.body":  # the only one
                now = time.monotonic()
                self._on_refused(now - scope.get("baton.read_at", now), waited="baton.waited" in scope)

        tenant = self._who(scope["path"], headers)
        scope["tenant"] = tenant
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            app: ASGIApp = error_response(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes: send less")
        else:
            app = self._app if tenant is not None else _refusal(scope["path"])
        try:
            await app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.info("http.client_left", extra={"request_id": request_id})
        except Exception:
            log.exception("http.crash", extra={"request_id": request_id, "path": scope["path"]})
            if started:
                raise  # the server cuts the connection: half an answer must not look whole
            crash = error_response(500, "internal error", kind="server_error", code="internal")
            await crash(scope, receive, send_with_id)

    def _who(self, path: str, headers: Headers) -> Tenant | None:
        """Who asks, or None when this key, or none, is not enough for `path`.

        Metrics and timelines tell of all tenants: where there is an admin key, they need it.
        """
        tenants = self._tenants
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if is_open(path):
            return tenants.default
        if is_under(path, ADMIN_PATHS) or (tenants.keys.has_admin and is_under(path, OPERATOR_PATHS)):
            return tenants.default if tenants.keys.is_admin(key) else None
        return tenants.default if tenants.open_to_all else tenants.keys.tenant_of(key)


def _refusal(path: str) -> Response:
    kind = "admin key" if is_under(path, ADMIN_PATHS + OPERATOR_PATHS) else "API key"
    refusal = error_response(401, f"a valid {kind} is needed: send `Authorization: Bearer KEY`", code="invalid_api_key")
    refusal.headers["www-authenticate"] = "Bearer"
    return refusal


async def _on_serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    status, kind = error_status(error)
    response = error_response(status, error.message, kind=kind, param=error.param, code=error_code(error))
    if isinstance(error, RefusedError) and error.waited:
        request.scope["baton.waited"] = True
    if status in REFUSALS:
        response.headers["retry-after"] = str(max(1, math.ceil(getattr(error, "retry_after_s", 1.0))))
    if isinstance(error, RateLimitedError):
        response.headers.update(error.headers)
    if isinstance(error, QuarantinedError):
        response.headers["x-should-retry"] = "false"  # OpenAI's clients try a 500 again: not one that fells workers
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: f"no route {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    is_plain = error.detail == HTTPStatus(error.status_code).phrase  # raised by the router, or without a word
    message = known.get(error.status_code, error.detail) if is_plain else error.detail
    response = error_response(error.status_code, str(message))
    response.headers.update(error.headers or {})
    return response
