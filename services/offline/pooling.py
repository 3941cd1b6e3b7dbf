"""Vectors and scores in one process: the gateway's reading and writing of APIs, around passes of our own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from common.errors import InvalidRequestError, ServingError, error_from_code
from common.messages import Pool, Pooled
from engine.pooling.engine import PoolingEngine
from engine.processor import settle
from gateway.http.exchange import RequestScope
from gateway.http.fields import parse_body
from gateway.http.problem import INTERNAL, error_object, problem_of
from gateway.pooling.apis import Asking
from gateway.pooling.fleet import Turn
from gateway.pooling.routes import PATHS
from gateway.pooling.service import Answering, PooledModel
from gateway.pooling.texts import TextTokenizer
from gateway.request.timeline import Timelines
from gateway.tenants.budgets import LocalBudgets
from services.pool.process import batch_tokens, build_engine
from services.runtime.memory import keep_what_is_loaded
from services.worker.settings import WorkerServiceSettings
from worker.pooling.passes import Passes

log = logging.getLogger("baton.offline")

DEADLINE_S = 1e6  # nobody waits at a connection
MOST = 256  # requests that are worth having at a time


class OwnFleet:
    """The passes of this process, as a gateway asks its workers."""

    num_ready, max_answer_bytes = 1, 1 << 62  # no message carries it

    def __init__(self, engine: PoolingEngine, passes: Passes) -> None:
        self.longest: int | None = engine.max_model_len
        self._passes = passes

    def turn_away(self, tokens: int) -> None:
        """Nobody is turned away: the parent sends as much as there is room for."""

    async def ask(self, message: Pool, turn: Turn) -> Pooled:
        """Raises ServingError."""
        reply = await self._passes.answer(msgspec.structs.replace(message, remaining_ms=int(1000 * DEADLINE_S)))
        if reply.code:
            raise error_from_code(reply.code, reply.message)
        return reply


class OfflinePooling:
    """One model's answers, whatever name a request has for it."""

    most = MOST

    def __init__(self, model: PooledModel, *, max_model_len: int) -> None:
        self.name, self.max_model_len = model.name, max_model_len
        self._model = model
        self._answering = Answering(self, budgets=LocalBudgets(), timelines=Timelines(), deadline_s=DEADLINE_S)

    @property
    def models(self) -> dict[str, PooledModel]:
        return {self.name: self._model}

    def find(self, name: str) -> PooledModel:
        return self._model

    async def answered(self, url: str, body: bytes) -> tuple[int, Any]:
        """Status and body, as the gateway would answer. Never raises for what a request says."""
        try:
            path = PATHS.get(url)
            if path is None:
                known = ", ".join(PATHS)
                raise InvalidRequestError(
                    f"url: {url[:100]!r} is not for a model that makes no text: {known} are", param="url"
                )
            scope = RequestScope(request_id=uuid.uuid4().hex)
            return 200, await path.api.answer(parse_body(body, path.api.body), Asking(self._answering, scope))
        except ServingError as error:
            problem = problem_of(error)
            return problem.status, error_object(problem)
        except Exception:
            log.exception("offline.crashed", extra={"url": url})
            return INTERNAL.status, error_object(INTERNAL)


@contextlib.asynccontextmanager
async def pooling(settings: WorkerServiceSettings) -> AsyncIterator[OfflinePooling]:
    """Load the model, and compute while the context is open. Raises ConfigError, OSError, ValueError."""
    if settings.processor == "cpu":
        settle()
    most, settings = batch_tokens(settings), settings.sized()
    tokenizer = await asyncio.to_thread(TextTokenizer.read, settings.model)
    engine = await asyncio.to_thread(build_engine, settings)
    passes = Passes(engine, max_batch_tokens=most)
    keep_what_is_loaded()
    computing = asyncio.create_task(passes.run())
    try:
        model = PooledModel(settings.served_name, tokenizer, OwnFleet(engine, passes))
        yield OfflinePooling(model, max_model_len=engine.max_model_len)
    finally:
        computing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await computing
