"""The stored part of the Responses API at one gateway, started and stopped as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from common.errors import UnavailableError
from common.tasks import cancel_all
from common.tracing import Tracer
from common.wire import Wire
from gateway.answers.start import Answers
from gateway.dialects.dialect import Memory as MemoryProtocol
from gateway.dialects.responses.dialect import RESPONSES
from gateway.dialects.table import DialectTable
from gateway.http.api import ApiPart
from gateway.http.application import Handler, Routes
from gateway.http.body import BodyLimits
from gateway.http.problem import NotKeptError
from gateway.keeping.running import keep_running
from gateway.observe.metrics import GatewayMetrics
from gateway.responses.conversations import Conversations
from gateway.responses.memory import Memory
from gateway.responses.metrics import KeptMetrics
from gateway.responses.openapi import RESPONSES_API
from gateway.responses.records import ResponseLimits
from gateway.responses.routes import KeptRoutes
from gateway.responses.runner import Runner
from gateway.responses.store import ResponseStore, response_streams
from gateway.sessions.routes import SESSIONS_API, SessionRoutes
from gateway.sessions.store import Sessions
from gateway.tenants.tenants import Tenants

NO_SESSIONS = "this gateway keeps no sessions (--responses-store-mb off): workers find what they have by itself"
NO_STORE = "this gateway keeps no responses and no conversations (--responses-store-mb off): send all of it in input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The parts for the application: routes, and the memory of each path that has one."""

    routes: Sequence[Routes]
    memories: Mapping[str, MemoryProtocol[Any]] = field(default_factory=dict)


class Responses:
    """Stores responses and conversations, and runs background responses between `start` and `leave`."""

    def __init__(self, wire: Wire, limits: ResponseLimits, tenants: Tenants, *, tracer: Tracer) -> None:
        self._streams = response_streams(wire, limits)
        self._store = ResponseStore(self._streams, limits)
        self._tenants = tenants
        self._tracer = tracer
        self._runner: Runner | None = None
        self._loop: asyncio.Task[None] | None = None

    def connect(
        self, answers: Answers, dialects: DialectTable, metrics: GatewayMetrics, body_limits: BodyLimits
    ) -> Joined:
        """Create the routes. Background responses run through `answers`."""
        conversations, kept = Conversations(self._store), KeptMetrics(metrics.registry)
        memory = Memory(self._store, conversations, answers, kept)
        self._runner = Runner(
            self._store,
            memory,
            answers,
            dialects.entries[RESPONSES],
            self._tenants,
            kept,
            metrics,
            tracer=self._tracer,
        )
        routes = KeptRoutes(self._store, conversations, memory, body_limits, self._runner.cancelled)
        sessions = SessionRoutes(Sessions(self._streams, self._store.rooms), answers)
        return Joined(routes=(routes.routes, sessions.routes), memories={RESPONSES: memory})

    async def start(self) -> None:
        """Start what runs."""
        assert self._runner is not None
        self._streams.open()
        self._loop = asyncio.create_task(keep_running(self._runner))

    def leave(self) -> None:
        """Take no more background responses; running ones continue."""
        assert self._runner is not None
        self._runner.leave()

    def hang_up(self) -> None:
        """End the streams of background responses, which the server would wait for; clients resume them elsewhere."""
        self._store.leaving.set()

    async def stop(self) -> None:
        """Release running responses to other gateways, and disconnect."""
        if self._runner is not None and self._loop is not None:
            await self._runner.stop()
            await cancel_all([self._loop])  # a hanging pull ends with its streams
        with contextlib.suppress(UnavailableError):
            await self._streams.close()


def nothing_kept(*_: object) -> Joined:
    """The same paths without a store: each refuses."""
    return Joined(routes=(_refusing(RESPONSES_API, NO_STORE), _refusing(SESSIONS_API, NO_SESSIONS)))


def _refusing(api: ApiPart, why: str) -> Routes:
    async def refuse(request: Request) -> Response:
        raise NotKeptError(why)

    def with_method(method: str) -> dict[str, Handler]:
        return {path: refuse for path, operations in api.paths.items() if method in operations}

    return Routes(gets=with_method("get"), posts=with_method("post"), deletes=with_method("delete"), api=api)
