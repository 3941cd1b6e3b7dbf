"""Administrators' routes: create and revoke keys, create tenants and set their limits, report usage.

Each asks for an admin key. A key is shown by the answer that made it, and nowhere again.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from pydantic import Field, StrictBool, StrictInt, StrictStr

from common.errors import InvalidRequestError
from gateway.answers.changes import changed
from gateway.http.api import JSON, ApiPart, fields, get, path_parameters, post
from gateway.http.application import Routes
from gateway.http.body import BodyLimits, read_fields
from gateway.http.exchange import request_scope
from gateway.http.fields import Number, StrictFields
from gateway.http.problem import ConflictError, NotKeptError, json_response
from gateway.tenants.kept import KeptKeys
from gateway.tenants.register import MadeKey, MadeTenant, Register, is_key_id, new_key_id
from gateway.tenants.tenants import DEFAULT, TENANT_NAME, GoalFields, Tenant, Tenants, hash_key, new_key
from gateway.tenants.usage import MAX_HOURS, usage_json

audit = logging.getLogger("baton.audit")

BODY_LIMITS = BodyLimits(max_bytes=4096, timeout_s=5.0)
DAY_S = 86_400
_KEYS, _REVOKE, _TENANTS = "/admin/keys", "/admin/keys/{key_id}/revoke", "/admin/tenants"
_TENANT, _USAGE = "/admin/tenants/{name}", "/admin/usage"
_LIMIT = Annotated[StrictInt, Field(ge=0, le=10**12)]


class NewKey(StrictFields):
    """A key of a tenant, or an administrator's."""

    tenant: Annotated[StrictStr, Field(pattern=TENANT_NAME)] = DEFAULT
    name: Annotated[StrictStr, Field(max_length=64)] = ""
    admin: StrictBool = False
    expires_in_days: Annotated[Number, Field(gt=0, le=3650)] | None = None


class TenantOptions(GoalFields, StrictFields):
    """A tenant's limits; 0 is no limit. Omitted ones get defaults, except the salt, which nobody can read."""

    weight: Annotated[Number, Field(gt=0, le=1000)] = 1.0
    queue_share: Annotated[Number, Field(gt=0, le=1)] = 0.5
    max_priority: Annotated[StrictInt, Field(ge=-100, le=100)] = 0
    requests_per_minute: _LIMIT = 0
    tokens_per_minute: _LIMIT = 0
    max_concurrent: Annotated[StrictInt, Field(ge=0, le=10_000)] = 0
    cache_salt: Annotated[StrictStr, Field(max_length=256)] | None = None
    kv_share: Annotated[Number, Field(gt=0, le=1)] = 1.0
    loads: Annotated[list[Annotated[StrictStr, Field(max_length=256)]], Field(max_length=64)] | None = None


class KeyRoutes:
    """Keys and tenants, created through any gateway and valid at all of them."""

    def __init__(self, kept: KeptKeys, tenants: Tenants) -> None:
        self._kept = kept
        self._tenants = tenants
        self.routes = Routes(
            gets={_KEYS: self.keys, _TENANTS: self.all_tenants, _USAGE: self.usage},
            posts={_KEYS: self.create, _REVOKE: self.revoke, _TENANT: self.set_tenant},
            deletes={_TENANT: self.delete_tenant},
            api=_api(),
        )

    async def keys(self, request: Request) -> Response:
        """All keys, none in plain text: those created here with their id, those of the file by their hash's first digits."""
        now = time.time()
        made = sorted(self._kept.register.keys.values(), key=lambda key: (key.created_at, key.id), reverse=True)
        of_file = [
            {
                "id": key.id,
                "name": "",
                "tenant": key.tenant.name if key.tenant else None,
                "admin": key.tenant is None,
                "state": "active",
                "source": "file",
                **dict.fromkeys(("created_at", "expires_at", "revoked_at", "created_by", "revoked_by")),
            }
            for key in self._tenants.from_file
        ]
        return json_response(
            {
                "keys": [key.as_json(now) for key in made] + of_file,
                "your_key": request_scope(request.scope).tenant.key,
                "open_to_all": self._tenants.open_to_all,
            }
        )

    async def create(self, request: Request) -> Response:
        """Create a key; only this answer contains it."""
        body = await read_fields(request, BODY_LIMITS, NewKey)
        if re.search(r"[\x00-\x1f\x7f]", body.name):
            raise InvalidRequestError("name: control characters are not allowed", param="name")
        now, plain = time.time(), new_key()
        key = MadeKey(
            id=new_key_id(),
            digest=hash_key(plain),
            tenant="" if body.admin else body.tenant,
            name=body.name,
            is_admin=body.admin,
            created_at=int(now),
            created_by=_by(request),
            expires_at=int(now + body.expires_in_days * DAY_S) if body.expires_in_days else 0,
        )

        def with_key(register: Register) -> Register:  # the newest register may have a new tenant
            if not key.is_admin and self._tenants.named(key.tenant) is None:
                message = f"tenant: there is no {key.tenant!r}: make it first, POST /admin/tenants/{key.tenant}"
                raise InvalidRequestError(message, param="tenant")
            return register.with_key(key, now)

        await changed(self._kept, with_key)
        _audit(request, "keys.created", key=key.id, tenant=key.tenant, admin=key.is_admin, expires_at=key.expires_at)
        return json_response(key.as_json(now) | {"key": plain}, headers={"cache-control": "no-store"})

    async def revoke(self, request: Request) -> Response:
        """Revoke a key. Within a second no gateway accepts it; its running requests continue."""
        key_id, now, by = request.path_params["key_id"], time.time(), _by(request)
        if any(key.id == key_id for key in self._tenants.from_file):
            raise ConflictError(f"key {key_id} is in the gateways' files: take it out there, and send them SIGHUP")
        if not is_key_id(key_id):
            raise NotKeptError(f"no key {key_id[:100]!r}: GET /admin/keys lists them", param="key_id")
        register = await changed(self._kept, lambda register: register.revoked(key_id, by=by, now=now))
        key = register.keys[key_id]
        _audit(request, "keys.revoked", key=key_id, tenant=key.tenant, admin=key.is_admin)
        return json_response(key.as_json(now))

    async def all_tenants(self, request: Request) -> Response:
        """Every tenant with its options, and their origin."""
        made, of_file = self._kept.register.tenants, self._tenants.names_of_file
        found = []
        for name in self._tenants.names:
            tenant = self._tenants.named(name)
            source = "file" if name in of_file else "made" if name in made else "built in"
            if tenant is not None:
                found.append(_tenant_json(tenant) | {"source": source})
        return json_response({"tenants": found})

    async def set_tenant(self, request: Request) -> Response:
        """Create a tenant, or change its options; they apply to its next requests."""
        name = self._made_name(request)
        body = await read_fields(request, BODY_LIMITS, TenantOptions, default=b"{}")
        own = set(TenantOptions.model_fields) - set(GoalFields.model_fields)
        options = MadeTenant(**body.model_dump(include=own), goal=body.goal)

        def with_tenant(register: Register) -> Register:
            known = register.tenants.get(name)
            if known is None or options.cache_salt is not None:
                return register.with_tenant(name, options)
            return register.with_tenant(name, msgspec.structs.replace(options, cache_salt=known.cache_salt))

        await changed(self._kept, with_tenant)
        told = msgspec.structs.replace(options, cache_salt=options.cache_salt and "(hidden)")
        _audit(request, "tenants.set", tenant=name, options=repr(told))
        tenant = self._tenants.named(name)
        return json_response(_tenant_json(tenant) | {"source": "made"} if tenant is not None else {})

    async def delete_tenant(self, request: Request) -> Response:
        """Delete a tenant without keys."""
        name, now = self._made_name(request), time.time()
        await changed(self._kept, lambda register: register.without_tenant(name, now))
        _audit(request, "tenants.deleted", tenant=name)
        return json_response({"name": name, "deleted": True})

    async def usage(self, request: Request) -> Response:
        """Requests and tokens by key over the last hours, at all gateways."""
        text = request.query_params.get("hours", "24")
        if not (text.isascii() and text.isdecimal() and len(text) < 5 and 1 <= int(text) <= MAX_HOURS):
            raise InvalidRequestError(f"hours: must be 1 to {MAX_HOURS}", param="hours")
        hours = int(text)
        return json_response(usage_json(await self._kept.used(hours // 24 + 1), hours=hours))

    def _made_name(self, request: Request) -> str:
        name: str = request.path_params["name"]
        if not re.fullmatch(TENANT_NAME, name):
            raise InvalidRequestError("name: must be 1 to 64 letters, digits and _.-", param="name")
        if name in self._tenants.names_of_file:
            raise ConflictError(
                f"tenant {name} is in the gateways' file of --tenants: change it there, and send SIGHUP"
            )
        return name


def _by(request: Request) -> str:
    return request_scope(request.scope).tenant.key


def _audit(request: Request, event: str, **what: Any) -> None:
    """Log one line for each change: who did what. Never a key."""
    scope = request_scope(request.scope)
    audit.info(event, extra=what | {"by": scope.tenant.key, "request_id": scope.request_id})


def _tenant_json(tenant: Tenant) -> dict[str, Any]:
    limits = tenant.limits
    return {
        "name": tenant.name,
        "weight": tenant.weight,
        "queue_share": tenant.queue_share,
        "max_priority": tenant.max_priority,
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "max_concurrent": limits.max_concurrent,
        "shares_cache": not tenant.cache_salt,
        "kv_share": tenant.kv_share,
        "loads": None if tenant.loads is None else list(tenant.loads),
        "ttft_slo_ms": tenant.goal.ttft_ms,
        "ttft_slo_ms_per_token": tenant.goal.ttft_ms_per_token,
        "tpot_slo_ms": tenant.goal.tpot_ms,
    }


def _api() -> ApiPart:
    text, listed = {"type": "string"}, {"type": "array", "items": {"type": "object"}}
    key = fields({"id": text, "state": text})
    revoking = post(NewKey, key) | {"summary": "Refuse a key from now on.", "parameters": path_parameters(_REVOKE)}
    del revoking["requestBody"]
    setting = post(TenantOptions, fields({"name": text})) | {"parameters": path_parameters(_TENANT)}
    setting["requestBody"]["required"] = False
    deleting = get(_TENANT, "Delete a tenant without keys.", JSON, answer=fields({"name": text}))
    hours = {"name": "hours", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_HOURS}}
    return ApiPart(
        paths={
            _KEYS: {
                "get": get(_KEYS, "Keys, by their ids.", JSON, answer=fields({"keys": listed})),
                "post": post(NewKey, fields({"id": text, "key": text})),
            },
            _REVOKE: {"post": revoking},
            _TENANTS: {"get": get(_TENANTS, "Tenants and their limits.", JSON, answer=fields({"tenants": listed}))},
            _TENANT: {"post": setting, "delete": deleting},
            _USAGE: {"get": get(_USAGE, "What keys used.", JSON, query=(hours,), answer=fields({"keys": listed}))},
        },
        bodies=(NewKey, TenantOptions),
    )
