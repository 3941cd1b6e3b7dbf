"""The middleware around every request, one class a concern; `gateway.app` lists them.

Plain ASGI. Only `RequestIds` wraps `send`, so that a streamed token passes one function of ours and not five; the other layers
look at the status that it notes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.keys import BEARER, KeyForm, needed
from gateway.http.problem import INTERNAL, REFUSALS, Problem, UnauthorizedError
from gateway.http.request_scope import fields_of, request_id_of, request_scope
from gateway.http.routing import served_path
from gateway.tenants.tenants import ADMIN_PATHS, METRICS_PATHS, OPERATOR_PATHS, Tenant, Tenants, is_under

log = logging.getLogger("baton.http")

Refuse = Callable[[Scope, Problem], Response]  # an error in the form of the request's dialect


class Paths:
    """Normalises the path: see `served_path`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = served_path(scope["path"])
        await self._app(scope, receive, send)


class RequestIds:
    """Gives every request an id, the client's or a new one, and records the answer's status."""

    def __init__(self, app: ASGIApp, *, id_header: Callable[[Scope], str]) -> None:
        """`id_header`: a further header for a request's id; "" for none."""
        self._app = app
        self._id_header = id_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = request_scope(scope)
        state.request_id = request_id_of(fields_of(scope))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state.request_id
                if header := self._id_header(scope):
                    headers[header] = state.request_id
                for name, value in state.headers.items():
                    headers.append(name, value)
            await send(message)

        await self._app(scope, receive, send_with_id)


class ObserveRefusal(Protocol):
    """The observer of the time from a request's last byte to its refusal's."""

    def __call__(self, seconds: float, *, waited: bool) -> None: ...


class RefusalTimes:
    """Measures the duration of refusals on clients' paths."""

    def __init__(self, app: ASGIApp, *, is_measured: Callable[[Scope], bool], observe: ObserveRefusal) -> None:
        self._app = app
        self._is_measured = is_measured
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        state = request_scope(scope)
        if state.problem in REFUSALS and self._is_measured(scope):
            self._observe(time.monotonic() - state.read_at, waited=state.waited)


class Crashes:
    """Turns a crash into an error object. A disconnect is none."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            log.info("http.client_left", extra={"request_id": request_scope(scope).request_id})
        except Exception:
            if scope["type"] != "http":
                raise
            state, path = request_scope(scope), scope["path"]
            log.exception("http.crash", extra={"request_id": state.request_id, "path": path})
            if state.status:
                raise  # the server cuts the connection: a partial answer must not look complete
            await self._refuse(scope, INTERNAL)(scope, receive, send)


class Greeting:
    """Answers `/` on one port with the greeting that its clients expect; no key is needed."""

    def __init__(self, app: ASGIApp, *, port: int, text: str) -> None:
        self._app = app
        self._port = port
        self._text = text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_root = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        app = self._app
        if is_root and scope["server"] is not None and scope["server"][1] == self._port:
            app = Response(self._text, media_type="text/plain")
        await app(scope, receive, send)


class KeyCheck:
    """Finds the tenant of a request's key; refuses keys without access to the path."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tenants: Tenants,
        key_form: Callable[[Scope], KeyForm],
        is_open: Callable[[str, str], bool],
        refuse: Refuse,
        told: Callable[[str, str], None],
    ) -> None:
        """`is_open`: the path needs no key for this method. `told` gets the id and path of each refused request."""
        self._told = told
        self._app = app
        self._tenants = tenants
        self._key_form = key_form
        self._is_open = is_open
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            path = scope["path"]
            needs_admin = is_under(path, ADMIN_PATHS + OPERATOR_PATHS)
            form = BEARER if needs_admin else self._key_form(scope)
            tenant = self._tenant(scope, form.read(fields_of(scope)))
            if tenant is None:
                kind = "admin key" if needs_admin else "API key"
                self._told(request_scope(scope).request_id, path)
                app = self._refuse(scope, _unauthorized(kind, form))
            else:
                request_scope(scope).tenant = tenant
        await app(scope, receive, send)

    def _tenant(self, scope: Scope, key: str) -> Tenant | None:
        """The tenant; None if the key gives no access to the path.

        Metrics and timelines tell of all tenants, so they need the admin key if there is one, or metrics their own.
        """
        tenants, path = self._tenants, scope["path"]
        opens_metrics = is_under(path, METRICS_PATHS) and tenants.opens_metrics(key)
        if opens_metrics or self._is_open(scope["method"], path):
            return tenants.default
        if is_under(path, ADMIN_PATHS) or (tenants.needs_admin and is_under(path, OPERATOR_PATHS)):
            admin = tenants.keys.admin_of(key)
            return replace(tenants.default, key=admin) if admin else None
        return tenants.asking(key)


def _unauthorized(kind: str, form: KeyForm) -> Problem:
    return Problem(
        status=401,
        message=needed(kind, form),
        code=UnauthorizedError.code,
        headers={"www-authenticate": form.challenge} if form.challenge else {},
    )
