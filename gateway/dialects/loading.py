"""Loading and unloading of models by request, as other servers name it: vLLM's sleep, Triton's repository, OpenAI's delete.

Only hosts load and unload (`baton up --keep-alive`). Nobody's requests are hurt: a model with requests stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ConfigDict, StrictStr

from common.errors import InvalidRequestError
from common.words import HostStatus
from gateway.answers.ask import FOREVER_S
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.http.api import fields
from gateway.http.fields import StrictFields
from gateway.http.problem import ConflictError, ForbiddenError, Json
from gateway.request.spec import NOT_ALLOWED, Loads
from gateway.tenants.tenants import Tenant

NO_LOADING = (
    "models are not loaded by request here: a worker serves one as soon as it runs, until it is stopped; "
    "`baton up --keep-alive` loads and unloads them"
)


class NamedModelRequest(StrictFields):
    """A body about the model that its path names; other fields change nothing."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = ""


class LoadModels:
    """Loads the named model, or all that hosts offer."""

    body = NamedModelRequest

    def __init__(self, told: Callable[[str], Any], *, keep_s: float | None = None) -> None:
        """`keep_s`: see `Loads.load`."""
        self._told = told
        self._keep_s = keep_s

    async def answer(self, body: NamedModelRequest, answers: Answers, asked: Asked) -> Any:
        """Raises ModelNotFoundError, InvalidRequestError without a host, UnavailableError if it can't be loaded."""
        loads, names = _hosted(answers, body.model or asked.query.get("model", ""), asked.tenant)
        for name in names:
            await loads.load(name, self._keep_s)
        return self._told(names[0])


class UnloadModels:
    """Unloads the named model, or all that hosts offer."""

    body = NamedModelRequest

    def __init__(self, told: Callable[[str], Any], *, parks: bool = False) -> None:
        """`parks`: at level 1, the default, weights stay in memory where hosts can do that."""
        self._told = told
        self._parks = parks

    async def answer(self, body: NamedModelRequest, answers: Answers, asked: Asked) -> Any:
        """Raises ModelNotFoundError, InvalidRequestError without a host, ConflictError while a named model has requests."""
        named = body.model or asked.query.get("model", "")
        level = asked.query.get("level", "1")
        if self._parks and level not in LEVELS:
            raise InvalidRequestError(f"level {level!r}: is 1, weights stay in memory, or 2, they don't", param="level")
        loads, names = _hosted(answers, named, asked.tenant)
        if named and loads.is_active(names[0]):
            raise ConflictError(f"model {names[0]!r} has requests, and stays until they end", param="model")
        for name in names:
            if not loads.is_active(name):
                await loads.unload(name, parks=self._parks and level == "1")
        return self._told(named or names[0])


def sleeping(answers: Answers, asked: Asked) -> Json:
    """True if no model that hosts offer is loaded, or not the one of the query."""
    loads, names = _hosted(answers, asked.query.get("model", ""))
    found = [loads.find(name) for name in names]
    return {"is_sleeping": all(one is not None and one.status is not HostStatus.READY for one in found)}


def nothing(name: str) -> Json:
    return {}


def deleted(name: str) -> Json:
    """OpenAI's answer to a deletion."""
    return {"id": name, "object": "model", "deleted": True}


def _hosted(answers: Answers, name: str, tenant: Tenant | None = None) -> tuple[Loads, Sequence[str]]:
    """The named model, or all, if hosts offer them. Raises ModelNotFoundError or InvalidRequestError.

    `tenant`: only what it may have loaded, else ForbiddenError.
    """
    catalogue = answers.catalogue
    names = [catalogue.pooled_name(name) or answers.find(name).name] if name else [*catalogue.names, *catalogue.pooled]
    loads = answers.loads
    offered = [one for one in names if loads is not None and loads.find(one) is not None]
    if loads is None or not offered:
        raise InvalidRequestError(NO_LOADING, param="model" if name else None)
    allowed = [one for one in offered if tenant is None or tenant.may_load(one)]
    if not allowed:
        raise ForbiddenError(NOT_ALLOWED.format(model=offered[0]), param="model" if name else None)
    return loads, allowed


LEVELS = ("1", "2")
SLEEP, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
WAKES, SLEEPS, DELETES = LoadModels(nothing), UnloadModels(nothing, parks=True), UnloadModels(deleted)
TRITON_LOADS, TRITON_UNLOADS = LoadModels(nothing, keep_s=FOREVER_S), UnloadModels(nothing)
DELETED = fields({"id": {"type": "string"}, "object": {"type": "string"}, "deleted": {"type": "boolean"}})
ASLEEP = fields({"is_sleeping": {"type": "boolean"}})
