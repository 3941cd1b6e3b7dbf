"""The routes of sessions under names, and the same in llama.cpp's form.

Restoring is a request that computes the prompt: its KV is found where workers have it, or made, and is wished to stay for a day.
"""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Request, Response
from pydantic import Field, StrictStr

from common.blocks import unpack_tokens
from common.errors import InvalidRequestError
from common.messages import Keep, SamplingParams
from gateway.answers.ask import Ask, Sampling, Terms, TextRules, TokenIds
from gateway.answers.sessions import SessionState
from gateway.answers.start import Answers
from gateway.http.api import JSON, ApiPart, fields, get, path_parameters, post
from gateway.http.application import Routes
from gateway.http.body import BodyLimits, read_fields
from gateway.http.exchange import request_scope
from gateway.http.fields import StrictFields
from gateway.http.problem import ConflictError, Json, json_response
from gateway.request.spec import Origin
from gateway.sessions.store import SessionRecord, Sessions

BODY_LIMITS = BodyLimits(max_bytes=4096, timeout_s=5.0)
KEEP_S = 86_400.0  # a wish
MAX_SLOT = 1_023
SESSIONS, SESSION, SLOT = "/v1/sessions", "/v1/sessions/{name}", "/slots/{id_slot}"
RESTORE = f"{SESSION}/restore"
_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
Name = Annotated[StrictStr, Field(pattern=_NAME)]
SessionId = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class SaveRequest(StrictFields):
    """Body of POST /v1/sessions: the newest state of a session is kept under a name."""

    name: Name
    session: SessionId | None = None  # unset: the header's


class RestoreRequest(StrictFields):
    """Body of POST /v1/sessions/{name}/restore. `session` is what it is named from now on."""

    session: SessionId | None = None  # unset: the header's, or none


class SlotRequest(StrictFields):
    """Body of POST /slots/{id_slot}: a name for what is saved or restored."""

    filename: Name | None = None


class SessionRoutes:
    """Save, restore, list and drop, each for the tenant of the request's key."""

    def __init__(self, sessions: Sessions, answers: Answers) -> None:
        self._sessions, self._answers = sessions, answers
        self.routes = Routes(
            gets={SESSIONS: self.listed, SESSION: self.one},
            posts={SESSIONS: self.save, RESTORE: self.restore, SLOT: self.slot},
            deletes={SESSION: self.drop},
            api=SESSIONS_API,
        )

    async def save(self, request: Request) -> Response:
        """Keep the newest state of a session."""
        body = await read_fields(request, BODY_LIMITS, SaveRequest)
        session = body.session or request_scope(request.scope).session
        if not session:
            raise InvalidRequestError("session: name one, here or in the header x-session-id", param="session")
        return json_response((await self._save(request, body.name, session)).as_json())

    async def restore(self, request: Request) -> Response:
        """Bring a session's KV back, wherever its next request will look for it."""
        body = await read_fields(request, BODY_LIMITS, RestoreRequest, default=b"{}")
        session = body.session or request_scope(request.scope).session
        return json_response(await self._restore(request, request.path_params["name"], session))

    async def listed(self, request: Request) -> Response:
        """All sessions, by their names."""
        found = await self._sessions.listed(_tenant(request))
        return json_response({"object": "list", "data": [record.as_json() for record in found]})

    async def one(self, request: Request) -> Response:
        """A session."""
        return json_response((await self._sessions.record(_tenant(request), request.path_params["name"])).as_json())

    async def drop(self, request: Request) -> Response:
        """Forget what a name keeps."""
        record = await self._sessions.drop(_tenant(request), request.path_params["name"])
        return json_response({"object": "session", "name": record.name, "deleted": True})

    async def slot(self, request: Request) -> Response:
        """llama.cpp's form: a slot is the session of the requests with its `id_slot`."""
        slot, action = request.path_params["id_slot"], request.query_params.get("action", "")
        if not (slot.isascii() and slot.isdecimal() and int(slot[:5]) <= MAX_SLOT):
            raise InvalidRequestError(f"id_slot: must be 0 to {MAX_SLOT}", param="id_slot")
        body = await read_fields(request, BODY_LIMITS, SlotRequest, default=b"{}")
        began, session, told = time.monotonic(), f"slot-{int(slot)}", {"id_slot": int(slot)}
        if action == "erase":
            return json_response(told | {"n_erased": self._answers.sessions.forget(_tenant(request), session)})
        if action not in ("save", "restore"):
            raise InvalidRequestError("action: must be save, restore or erase", param="action")
        if body.filename is None:
            raise InvalidRequestError("filename: it names what is kept", param="filename")
        more: Json = {"filename": body.filename}
        if action == "save":
            count = (await self._save(request, body.filename, session)).num_tokens
            more |= {"n_saved": count, "n_written": 4 * count}
        else:
            count = (await self._restore(request, body.filename, session))["num_tokens"]
            more |= {"n_restored": count, "n_read": 4 * count}
        return json_response(told | more | {"timings": {f"{action}_ms": 1000 * (time.monotonic() - began)}})

    async def _save(self, request: Request, name: str, session: str) -> SessionRecord:
        state = self._answers.sessions.find(_tenant(request), session)
        return await self._sessions.save(_tenant(request), name, state)

    async def _restore(self, request: Request, name: str, session: str) -> Json:
        state = await self._sessions.load(_tenant(request), name)
        cached = await self._computed(request, state, session)
        if session:
            self._answers.sessions.note(_tenant(request), session, state)
        record = await self._sessions.record(_tenant(request), name)
        return record.as_json() | {"cached_tokens": cached}

    async def _computed(self, request: Request, state: SessionState, session: str) -> int:
        """Compute a state's KV where it is lacking; return how many tokens' KV was there. Raises ServingError."""
        served, scope = self._answers.find(state.model), request_scope(request.scope)
        if served.fingerprint != state.weights:
            raise ConflictError(f"the session was kept with other weights of {state.model}: drop it")
        token_ids = unpack_tokens(state.token_ids)
        if served.max_model_len is not None:
            token_ids = token_ids[: served.max_model_len - 1]
        ask = Ask(
            model=state.model,
            answer_prefix="session-",
            prompts=[TokenIds(token_ids)],
            sampling=Sampling(params=SamplingParams(max_tokens=1)),
            text=TextRules(is_wanted=False),
            terms=Terms(cache_salt=state.cache_salt, keep=Keep(ttl_s=KEEP_S)),
        )
        self._answers.check(ask, scope.tenant)
        origin = Origin(scope.tenant, scope.trace.context, scope.received_at, session)
        answer = await self._answers.start(ask, origin, served)
        await answer.whole()
        return answer.usage().cached_tokens


def _tenant(request: Request) -> str:
    return request_scope(request.scope).tenant.name


_TEXT, _COUNT = {"type": "string"}, {"type": "integer"}
_TOLD = {"object": {"const": "session"}, "name": _TEXT, "model": _TEXT, "created_at": _COUNT, "num_tokens": _COUNT}
_LIST = fields({"object": {"const": "list"}, "data": {"type": "array", "items": fields(_TOLD)}})
_DELETED = fields({"object": {"const": "session"}, "name": _TEXT, "deleted": {"const": True}})
_ACTION = {"name": "action", "in": "query", "required": True, "schema": {"enum": ["save", "restore", "erase"]}}
_restoring = post(RestoreRequest, fields(_TOLD | {"cached_tokens": _COUNT})) | {"parameters": path_parameters(SESSION)}
_slot = post(SlotRequest, fields({"id_slot": _COUNT}), error="LlamaError")
SESSIONS_API = ApiPart(
    paths={
        SESSIONS: {
            "get": get(SESSIONS, "Sessions that are kept under names.", JSON, answer=_LIST),
            "post": post(SaveRequest, fields(_TOLD)),
        },
        SESSION: {
            "get": get(SESSION, "A session that is kept.", JSON, answer=fields(_TOLD)),
            "delete": get(SESSION, "Keep a session no more.", JSON, answer=_DELETED),
        },
        RESTORE: {"post": _restoring | {"requestBody": {**_restoring["requestBody"], "required": False}}},
        SLOT: {
            "post": _slot
            | {
                "requestBody": {**_slot["requestBody"], "required": False},
                "parameters": [*path_parameters(SLOT), _ACTION],
            }
        },
    },
    bodies=(SaveRequest, RestoreRequest, SlotRequest),
)
