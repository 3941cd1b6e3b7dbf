"""Handlers by path: what each part of the gateway adds to the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response

from gateway.http.api import ApiPart

Handler = Callable[[Request], Awaitable[Response]]
Paths = Mapping[str, Handler]


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
