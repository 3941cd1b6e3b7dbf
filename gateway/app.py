"""The HTTP application: its routes' table, the envelope of every answer, and what status each error becomes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from common.errors import QuarantinedError, ServingError
from gateway.dialect import Dialect
from gateway.generation import Generations
from gateway.metrics import GatewayMetrics
from gateway.responses import error_code, error_response, error_status
from gateway.routes import VERSION, HttpSettings, Routes
from gateway.tokenizer import ChatTokenizer

__all__ = ["HttpSettings", "create_app"]

log = logging.getLogger("baton.http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_OPEN_PATHS = frozenset({"/health", "/ready"})


def create_app(
    *,
    generations: Generations,
    tokenizer: ChatTokenizer,
    settings: HttpSettings,
    registry: CollectorRegistry | None = None,
) -> FastAPI:
    """Build the application. It owns no connection: start and stop `generations` around it.

    Metrics go to `registry`, by default one of the application's own, which `/metrics` shows.
    """
    app = FastAPI(title="Baton", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    dialect = Dialect(
        generations=generations,
        tokenizer=tokenizer,
        served_model=settings.served_model,
        default_deadline_s=settings.request_timeout_s,
    )
    routes = Routes(dialect, GatewayMetrics(settings.served_model, registry), settings)
    app.add_exception_handler(ServingError, _on_serving_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(Envelope, api_keys=settings.api_keys)
    for path, endpoint in routes.posts.items():
        app.add_route(path, endpoint, methods=["POST"])
    for path, endpoint in routes.gets.items():
        app.add_route(path, endpoint, methods=["GET"])  # and HEAD
    return app


class Envelope:
    """What holds for every answer: a request id, a key where one is configured, an error object even for a crash.

    Plain ASGI: streams pass untouched.
    """

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.match(asked) else uuid.uuid4().hex
        started = False

        async def send_with_id(message: AsgiMessage) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        app = self._app if self._may_enter(scope["path"], headers) else _refusal()
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

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if not self._keys or path in _OPEN_PATHS:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]  # all of them: constant time
        return scheme.lower() == "bearer" and any(matches)


def _refusal() -> Response:
    message = "a valid API key is needed: send `Authorization: Bearer KEY`"
    refusal = error_response(401, message, code="invalid_api_key")
    refusal.headers["www-authenticate"] = "Bearer"
    return refusal


async def _on_serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    status, kind = error_status(error)
    response = error_response(status, error.message, kind=kind, param=error.param, code=error_code(error))
    if status in (429, 503):
        response.headers["retry-after"] = str(max(1, round(getattr(error, "retry_after_s", 1.0))))
    if isinstance(error, QuarantinedError):
        response.headers["x-should-retry"] = "false"  # OpenAI's clients try a 500 again: not one that fells workers
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: f"no route {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    response = error_response(error.status_code, known.get(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response
