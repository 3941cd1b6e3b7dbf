"""Handlers by path: what each part of the gateway adds to the application."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import ServingError
from gateway.http.api import ApiPart
from gateway.http.request_scope import request_scope

Handler = Callable[[Request], Awaitable[Response]]
Refuse = Callable[[Request, Exception], Awaitable[Response]]
Paths = Mapping[str, Handler]
Value = TypeVar("Value")
_CONVERTOR = re.compile(r":\w+\}")


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

    def __init__(self, posts: Paths, others: ASGIApp, refuse: Refuse) -> None:
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

    def __init__(self, layers: Sequence[Middleware], posts: Paths, refuse: Refuse, **named: Any) -> None:
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
