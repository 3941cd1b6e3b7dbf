"""Access of web pages. A browser sends requests for any page, and with DNS rebinding to any host name.

A key keeps pages out, as no page knows it. Without keys, Host, Origin and Sec-Fetch-Site tell who asks.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.fields import IGNORED_HEADER
from gateway.http.problem import Problem
from gateway.http.request_scope import fields_of, request_scope

ANY = "*"
PREFLIGHT_MAX_AGE_S = 600
_METHODS = "GET, HEAD, POST, DELETE"
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}\Z")
_EXPOSED = f"x-request-id, retry-after, x-should-retry, {IGNORED_HEADER}, " + ", ".join(
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
_SAFE_METHODS = ("GET", "HEAD")


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
        has_keys: Callable[[], bool],
        refuse: Callable[[Scope, Problem], Response],
        id_headers: Sequence[str] = (),
    ) -> None:
        """`id_headers`: pages may read them, like other exposed headers."""
        self._app = app
        self._access = access
        self._has_keys = has_keys
        self._refuse = refuse
        self._exposed = ", ".join([_EXPOSED, *id_headers])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = fields_of(scope)
            origin = headers.get("origin", "")
            preflight = bool(origin) and scope["method"] == "OPTIONS" and "access-control-request-method" in headers
            is_let_in = bool(origin) and self._access.lets_in(origin)
            problem = None if self._has_keys() else self._wrong(scope, headers, is_let_in=is_let_in)
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
