"""An administrator's view of the models whose files are on this gateway's machine."""

from __future__ import annotations

from fastapi import Request, Response

from gateway.answers.changes import ModelFiles
from gateway.http.api import JSON, ApiPart, fields, get
from gateway.http.application import Routes
from gateway.http.problem import json_response

_MODELS = "/admin/models"


class KeptModelRoutes:
    """The kept models with their sizes."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        listed = fields({"models": {"type": "array", "items": {"type": "object"}}})
        told = get(_MODELS, "Models whose files are on this gateway's machine.", JSON, answer=listed)
        self.routes = Routes(gets={_MODELS: self.all}, api=ApiPart(paths={_MODELS: {"get": told}}))

    async def all(self, request: Request) -> Response:
        """Each with its name and bytes, how many of these others share, and whether a process serves it."""
        return json_response({"models": await self._files.kept()})
