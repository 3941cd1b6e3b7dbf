"""The HTTP application: middleware around every request besides the door's, and handlers by path at their end.

Middleware is plain ASGI, one class a concern; `gateway.app` lists it.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import ServingError
from gateway.http.api import ApiPart
from gateway.http.exchange import fields_of, request_scope
from gateway.http.fields import IGNORED_HEADER
from gateway.http.problem import INTERNAL, Problem
from gateway.tenants.tenants import Tenants

log = logging.getLogger("baton.http")

Handler = Callable[[Request], Awaitable[Response]]
Paths = Mapping[str, Handler]
Value = TypeVar("Value")
RefuseError = Callable[[Request, Exception], Awaitable[Response]]
Refuse = Callable[[Scope, Problem], Response]  # an error in the form of the request's dialect
ANY = "*"
PREFLIGHT_MAX_AGE_S = 600
_METHODS = "GET, HEAD, POST, DELETE"
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}\Z")
_EXPOSED = f"x-request-id, retry-after, x-should-retry, {IGNORED_HEADER}, " + ", ".join(
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
_SAFE_METHODS = ("GET", "HEAD")
_CONVERTOR = re.compile(r":\w+\}")


class ServedPaths:
    """Normalises the path: see `served_path`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = served_path(scope["path"])
        await self._app(scope, receive, send)


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


def served_path(path: str) -> str:
    """The canonical path of a request: without a trailing slash, and OpenAI's for Azure's, except deployments."""
    path = path.rstrip("/") or "/"
    rest = path.removeprefix("/openai/")
    return path if rest == path or rest.startswith("deployments/") else f"/v1/{rest.removeprefix('v1/')}"


def told_path(path: str) -> str:
    """A path with parameters for people, without their converters."""
    return _CONVERTOR.sub("}", path)


class ByPath(Generic[Value]):
    """Values by path. Paths without parameters match first, then others in order."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._plain = {path: value for path, value in values.items() if "{" not in path}
        self._others = [(compile_path(path)[0], value) for path, value in values.items() if "{" in path]

    def find(self, path: str) -> tuple[Value, Mapping[str, str]] | None:
        """A path's value and parameters."""
        plain = self._plain.get(path)
        if plain is not None:
            return plain, {}
        for pattern, value in self._others:
            found = pattern.match(path)
            if found is not None:
                return value, found.groupdict()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The paths of one subject, with their part of the OpenAPI document."""

    gets: Paths = field(default_factory=dict)
    posts: Paths = field(default_factory=dict)
    deletes: Paths = field(default_factory=dict)
    api: ApiPart

    def add_to(self, app: FastAPI) -> None:
        """Make `app` serve them."""
        for method, paths in (
            ("DELETE", self.deletes),
            ("POST", self.posts),
            ("GET", self.gets),
        ):  # GET serves HEAD, too
            for path, handler in paths.items():
                app.add_route(path, handler, methods=[method])


class Endpoints:
    """The end of all middleware: clients' POSTs by path, found at once, and FastAPI's routing for others."""

    def __init__(self, posts: Paths, others: ASGIApp, refuse: RefuseError) -> None:
        """`refuse` turns a ServingError or an HTTPException into an answer."""
        self._posts = ByPath(posts)
        self._others = others
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        found = self._posts.find(scope["path"]) if is_post else None
        try:
            if found is None:
                await self._others(scope, receive, send)
                return
            handler, scope["path_params"] = found
            answer = await handler(Request(scope, receive, send))
        except (ServingError, HTTPException) as error:
            if request_scope(scope).status:
                raise RuntimeError("an error after the answer began") from error
            answer = await self._refuse(Request(scope, receive, send), error)
        await answer(scope, receive, send)


class Application(FastAPI):
    """FastAPI with one stack: middleware, and `Endpoints` at their end."""

    def __init__(self, layers: Sequence[Middleware], posts: Paths, refuse: RefuseError, **named: Any) -> None:
        super().__init__(**named, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        self.user_middleware = list(layers)
        self._posts = posts
        self._refuse = refuse

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = Endpoints(self._posts, self.router, self._refuse)
        for layer in reversed(self.user_middleware):
            app = layer.cls(app, *layer.args, **layer.kwargs)
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass by FastAPI's own telemetry: `ServerSpans` traces requests."""
        if scope["type"] == "lifespan" or self.middleware_stack is None:
            await super().__call__(scope, receive, send)
        else:
            scope["app"] = self
            await self.middleware_stack(scope, receive, send)
