"""The middleware around every request, one class a concern; `gateway.app` lists them.

Plain ASGI. Only `RequestIds` wraps `send`, so that a streamed token passes one function of ours and not five; the other layers
look at the status that it notes.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.fields import IGNORED_HEADER
from gateway.http.problem import INTERNAL, REFUSALS, Problem, UnauthorizedError
from gateway.http.request_scope import BEARER, KeyForm, fields_of, needed, request_id_of, request_scope
from gateway.http.routing import served_path
from gateway.tenants.tenants import ADMIN_PATHS, METRICS_PATHS, OPERATOR_PATHS, Tenant, Tenants, is_under

log = logging.getLogger("baton.http")

Refuse = Callable[[Scope, Problem], Response]  # an error in the form of the request's dialect
ANY = "*"
PREFLIGHT_MAX_AGE_S = 600
_METHODS = "GET, HEAD, POST, DELETE"
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}\Z")
_EXPOSED = f"x-request-id, retry-after, x-should-retry, {IGNORED_HEADER}, " + ", ".join(
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
_SAFE_METHODS = ("GET", "HEAD")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WebAccess:
    """The allowed origins, and the host names accepted without keys."""

    origins: tuple[str, ...] = ()
    bound: str = "127.0.0.1"  # the listening address
    hosts: tuple[str, ...] = ()  # further names, besides that and loopback

    def lets_in(self, origin: str) -> bool:
        return origin in self.origins or ANY in self.origins

    def answers_to(self, host: str) -> bool:
        """True if a Host header names this gateway. A page can't make a browser send a false one."""
        name = _name(host)
        if not name or ANY in self.hosts or name in self.hosts or name == self.bound:
            return True  # every browser sends it
        address = _address(name)
        if address is None:
            return name == "localhost" or name.endswith(".localhost")
        bound = _address(self.bound)
        return address.is_loopback or (bound is not None and bound.is_unspecified)  # an address, so nothing to rebind


class Origins:
    """Answers preflights; refuses foreign pages if no key protects the gateway."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: WebAccess,
        tenants: Tenants,
        refuse: Callable[[Scope, Problem], Response],
        id_headers: Sequence[str] = (),
    ) -> None:
        """`id_headers`: pages may read them, like other exposed headers."""
        self._app = app
        self._access = access
        self._tenants = tenants
        self._refuse = refuse
        self._exposed = ", ".join([_EXPOSED, *id_headers])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = fields_of(scope)
            origin = headers.get("origin", "")
            preflight = bool(origin) and scope["method"] == "OPTIONS" and "access-control-request-method" in headers
            is_let_in = bool(origin) and self._access.lets_in(origin)
            problem = None if not self._tenants.open_to_all else self._wrong(scope, headers, is_let_in=is_let_in)
            if sum(name == b"origin" for name, _ in scope["headers"]) > 1:
                problem, is_let_in = Problem(status=400, message="there are several Origin headers: send one"), False
            if problem is None and preflight and not is_let_in:
                problem = _other_origin(origin)
            if is_let_in:
                request_scope(scope).headers = {
                    "access-control-allow-origin": origin,
                    "access-control-expose-headers": self._exposed,
                    "vary": "origin",
                }
            if problem is not None:
                app = self._refuse(scope, problem)
            elif preflight:
                app = Response(status_code=204, headers=_preflight(headers))
        await app(scope, receive, send)

    def _wrong(self, scope: Scope, headers: Mapping[str, str], *, is_let_in: bool) -> Problem | None:
        """The fault of a request that needs no key."""
        method: str = scope["method"]
        for host in [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]:
            if not self._access.answers_to(host):
                message = f"this gateway has no keys and does not answer as {_name(host)[:100]!r}: name it in --allowed-hosts, "
                return _forbidden(f"{message}or set --api-keys")
        origin, host = headers.get("origin", ""), headers.get("host", "")
        if not is_let_in:
            if origin and origin.lower().partition("://")[2] != (host.lower() or None):
                return _other_origin(origin)
            if not _is_own_page("" if origin else method, headers):  # links have no Origin
                return _other_origin("another site")
        if (
            method not in _SAFE_METHODS
            and headers.get("content-type", "").partition(";")[0].strip().lower() == "text/plain"
        ):
            return Problem(status=415, message="content-type: send application/json, not text/plain")
        return None


def _is_own_page(method: str, headers: Mapping[str, str]) -> bool:
    """False if another page's script may be asking, as far as a request without Origin shows. Links may come from anywhere."""
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return True
    wanted = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return method in _SAFE_METHODS and wanted == ("navigate", "document")


def _other_origin(origin: str) -> Problem:
    return _forbidden(f"pages of {origin[:200]} may not use this gateway: name their origin in --cors-origins")


def _forbidden(message: str) -> Problem:
    return Problem(status=403, message=message, code="forbidden")


def _preflight(headers: Mapping[str, str]) -> Mapping[str, str]:
    asked = headers.get("access-control-request-headers", "")
    said = {"access-control-allow-methods": _METHODS, "access-control-max-age": str(PREFLIGHT_MAX_AGE_S)}
    if _NAMES.match(asked):
        said["access-control-allow-headers"] = asked  # `*` would not include Authorization
    if headers.get("access-control-request-private-network") == "true":
        said["access-control-allow-private-network"] = "true"
    return said


def _name(host: str) -> str:
    """The name or address in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


@lru_cache(maxsize=64)
def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
