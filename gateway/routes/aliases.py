"""Administrators' routes for aliases: further names of models, with shares of their requests, changed while gateways run.

What is set through one gateway holds at all within a second, and is kept on NATS' disk beside the keys.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field, StrictStr

from gateway.answers.catalogue import Catalogue
from gateway.answers.changes import ALIAS, MadeAliases
from gateway.http.api import JSON, ApiPart, fields, get, path_parameters, post
from gateway.http.application import Routes
from gateway.http.body import BodyLimits, read_fields
from gateway.http.exchange import request_scope
from gateway.http.fields import Number, StrictFields
from gateway.http.problem import json_response
from gateway.tenants.shares import MAX_SHARES, Alias, Share

audit = logging.getLogger("baton.audit")

BODY_LIMITS = BodyLimits(max_bytes=16 << 10, timeout_s=5.0)
_ALIASES, _BACK, _ALIAS = "/admin/aliases", "/admin/aliases/rollback", "/admin/aliases/{name:path}"
_Name = Annotated[StrictStr, Field(pattern=ALIAS)]
_Text = Annotated[StrictStr, Field(max_length=128)]


class ShareFields(StrictFields):
    """A model and its part of the requests: one of percent, tenant and header."""

    model: _Text
    percent: Annotated[Number, Field(ge=0, le=100)] = 0.0
    tenant: _Text = ""
    header: _Text = ""
    value: _Text = ""


class NewAlias(StrictFields):
    """An alias and its shares."""

    name: _Name
    shares: Annotated[list[ShareFields], Field(min_length=1, max_length=MAX_SHARES)]


class AliasName(StrictFields):
    """An alias that was set here."""

    name: _Name


class AliasRoutes:
    """Aliases, set through any gateway and valid at all of them."""

    def __init__(self, made: MadeAliases, catalogue: Catalogue) -> None:
        self._made = made
        self._catalogue = catalogue
        self.routes = Routes(
            gets={_ALIASES: self.all},
            posts={_ALIASES: self.set, _BACK: self.roll_back},
            deletes={_ALIAS: self.delete},
            api=_api(),
        )

    async def all(self, request: Request) -> Response:
        """The present aliases, and where they come from."""
        found = [
            {"name": name, "shares": _shares_json(alias), "source": "made" if name in self._made else "configured"}
            for name, alias in self._catalogue.aliases.items()
        ]
        return json_response({"aliases": found, "models": [*self._catalogue.names, *self._catalogue.pooled]})

    async def set(self, request: Request) -> Response:
        """Set an alias: its next requests are shared out so. The shares before are kept for a rollback."""
        body = await read_fields(request, BODY_LIMITS, NewAlias)
        shares = [Share(**(each.model_dump() | {"percent": float(each.percent)})) for each in body.shares]
        return self._told(request, "aliases.set", body.name, await self._made.set(body.name, shares))

    async def roll_back(self, request: Request) -> Response:
        """Put an alias's earlier shares back; again, the later ones."""
        name = (await read_fields(request, BODY_LIMITS, AliasName)).name
        return self._told(request, "aliases.rolled_back", name, await self._made.roll_back(name))

    async def delete(self, request: Request) -> Response:
        """Drop what was set; an alias of the gateways' settings is as it was there."""
        name = request.path_params["name"]
        await self._made.drop(name)
        _audit(request, "aliases.deleted", alias=name)
        return json_response({"name": name, "deleted": True})

    def _told(self, request: Request, event: str, name: str, shares: tuple[Share, ...]) -> Response:
        _audit(request, event, alias=name, shares=", ".join(share.written() for share in shares))
        return json_response({"name": name, "shares": _shares_json(shares), "source": "made"})


def _shares_json(alias: Alias) -> list[dict[str, Any]]:
    shares = (Share(model=alias, percent=100.0),) if isinstance(alias, str) else alias
    named = [{name: getattr(share, name) for name in ShareFields.model_fields} for share in shares]
    return [{name: value for name, value in one.items() if value not in ("", 0.0)} for one in named]


def _audit(request: Request, event: str, **what: Any) -> None:
    scope = request_scope(request.scope)
    audit.info(event, extra=what | {"by": scope.tenant.key, "request_id": scope.request_id})


def _api() -> ApiPart:
    text, listed = {"type": "string"}, {"type": "array", "items": {"type": "object"}}
    told = fields({"name": text, "shares": listed})
    alias = _ALIAS.replace(":path", "")  # OpenAPI has no such converters
    deleting = get(alias, "Drop an alias that was set.", JSON, answer=fields({"name": text}))
    return ApiPart(
        paths={
            _ALIASES: {
                "get": get(_ALIASES, "Aliases and their shares.", JSON, answer=fields({"aliases": listed})),
                "post": post(NewAlias, told) | {"summary": "Set an alias's shares."},
            },
            _BACK: {"post": post(AliasName, told) | {"summary": "Put an alias's earlier shares back."}},
            alias: {"delete": deleting | {"parameters": path_parameters(alias)}},
        },
        bodies=(NewAlias, AliasName, ShareFields),
    )
