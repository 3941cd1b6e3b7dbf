"""Handlers by path: what each part of the gateway adds to the application."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import ServingError
from gateway.http.api import ApiPart

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


class HotPaths:
    """POSTs to some paths, through the same middleware but without the framework, which would double their cost."""

    def __init__(self, layers: Sequence[Middleware], posts: Paths, refuse: Refuse) -> None:
        """`refuse` turns a ServingError or an HTTPException into an answer."""
        self._posts = ByPath(posts)
        self._refuse = refuse
        self._hot: ASGIApp = self._serve
        for layer in reversed(layers):
            self._hot = layer.cls(self._hot, *layer.args, **layer.kwargs)

    def app_for(self, scope: Scope) -> ASGIApp | None:
        """The app that serves the request; None: the framework."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        return self._hot if is_post and self._posts.find(served_path(scope["path"])) is not None else None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._posts.find(scope["path"])
        assert found is not None
        handler, scope["path_params"] = found
        request = Request(scope, receive, send)
        try:
            answer = await handler(request)
        except (ServingError, HTTPException) as error:
            answer = await self._refuse(request, error)
        await answer(scope, receive, send)


class Application(FastAPI):
    """FastAPI's application, bypassed by hot paths."""

    hot: HotPaths | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hot = self.hot.app_for(scope) if self.hot is not None else None
        await (super().__call__ if hot is None else hot)(scope, receive, send)
