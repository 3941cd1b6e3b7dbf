"""Requests to answers in one process: the gateway's reading and writing of APIs, around an engine of our own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from common.errors import InvalidRequestError, ServingError
from common.settings import ConfigError
from engine.engine import Engine
from engine.processor import settle
from gateway.answers.catalogue import Catalogue
from gateway.answers.start import Answers
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects import DIALECTS
from gateway.dialects.table import DialectTable
from gateway.http.problem import INTERNAL, problem_of
from gateway.pooling.routes import PATHS
from gateway.request.spec import Origin
from gateway.tenants.budgets import LocalBudgets
from modelfiles.files import is_model
from modelfiles.pooling import is_pooled
from services.offline.generations import OfflineGenerations, Workers, computing
from services.offline.pooling import OfflinePooling, pooling
from services.runtime.loading import load_settings
from services.runtime.memory import keep_what_is_loaded
from services.runtime.models.named import brought
from services.runtime.models.progress import Say
from services.runtime.models.serving import serve
from services.runtime.settings import no_model
from services.worker.settings import WorkerServiceSettings

log = logging.getLogger("baton.offline")

DEADLINE_S = 1e9  # nobody waits at a connection
SPARE_REQUESTS = 64  # that are read and tokenised while the batch is full


def offline_settings(arguments: Sequence[str], say: Say) -> WorkerServiceSettings:
    """A worker's options, with the model's files fetched if it was named. Raises ConfigError."""
    settings = load_settings(WorkerServiceSettings, command="worker", arguments=arguments)
    if settings.speculative_config or settings.kv_host_mb != "0" or settings.kv_disk or settings.fake:
        raise ConfigError(
            "--speculative-config, --kv-host-mb, --kv-disk and --device fake are for workers: leave them out"
        )
    if settings.processes > 1:
        raise ConfigError("--tensor-parallel-size and --pipeline-parallel-size are for workers: leave them out")
    settings = settings.model_copy(update={"model": brought(settings.model, say)})
    if not is_pooled(settings.model):
        settings = settings.sized()
    if not is_model(settings.model):
        raise ConfigError(no_model(settings.model))
    return settings


class Offline:
    """One model's answers. Any number of requests may wait; `most` are worth having at a time."""

    def __init__(self, generations: OfflineGenerations, answers: Answers, *, name: str, most: int) -> None:
        self._answers = answers
        self._entries = DialectTable(DIALECTS).batchable
        self.generations, self.name, self.most = generations, name, most

    @property
    def max_model_len(self) -> int:
        return self.generations.model.max_model_len

    async def answered(self, url: str, body: bytes) -> tuple[int, Any]:
        """Status and body, as the gateway would answer. Never raises for what a request says."""
        entry = self._entries.get(url)
        if entry is None:
            known = ", ".join(self._entries)
            why = f"url: {url[:100]!r} is none of {known}"
            if url in PATHS:
                why = f"url: {url!r} is for a model of vectors or scores, and {self.name!r} generates text: load one of those"
            error = InvalidRequestError(why, param="url")
            return problem_of(error).status, {"error": {"message": error.message, "code": error.code}}
        try:
            read, ask = entry.read(body)
            if ask.stream:
                raise InvalidRequestError("stream: an answer here comes whole", param="stream")
            served = self._answers.find(ask.model)
            answer = await self._answers.start(ask, Origin(received_at=time.monotonic()), served)
            try:
                return 200, await entry.endpoint.whole(read, answer)
            finally:
                answer.cancel("it was given up")
        except ServingError as error:
            return entry.dialect.error(problem_of(error), f"req_{uuid.uuid4().hex}")
        except Exception:
            log.exception("offline.crashed", extra={"url": url})
            return entry.dialect.error(INTERNAL, f"req_{uuid.uuid4().hex}")


@contextlib.asynccontextmanager
async def opened(settings: WorkerServiceSettings) -> AsyncIterator[Offline | OfflinePooling]:
    """Load the model, and compute while the context is open. Raises ConfigError, OSError, ValueError."""
    serve(settings.model, "LLM, or baton run-batch")
    async with pooling(settings) if is_pooled(settings.model) else _generating(settings) as offline:
        yield offline


@contextlib.asynccontextmanager
async def _generating(settings: WorkerServiceSettings) -> AsyncIterator[Offline]:
    if settings.processor == "cpu":
        settle()
    tokenizer = await asyncio.to_thread(ChatTokenizer, settings.model)
    engine = await asyncio.to_thread(Engine, settings.engine())
    generations = OfflineGenerations(
        engine,
        name=settings.served_name,
        max_batch_tokens=max(settings.max_batch_tokens, settings.max_sequences),
        max_sequences=settings.max_sequences,
    )
    names = {settings.served_name: tokenizer}
    catalogue = Catalogue(names, Workers(generations), {"*": settings.served_name})
    answers = Answers(
        generations=generations, catalogue=catalogue, budgets=LocalBudgets(), default_deadline_s=DEADLINE_S
    )
    keep_what_is_loaded()
    try:
        async with computing(generations):
            most = settings.max_sequences + SPARE_REQUESTS
            yield Offline(generations, answers, name=settings.served_name, most=most)
    finally:
        tokenizer.close()
