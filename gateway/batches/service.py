"""One gateway's Batch API, started and stopped as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from common.tasks import cancel_all
from common.tracing import Tracer
from common.wire import Wire
from gateway.answers.start import Answers
from gateway.batches.metrics import BatchMetrics
from gateway.batches.pooled import PooledLines
from gateway.batches.records import BatchLimits
from gateway.batches.routes import BatchRoutes
from gateway.batches.runner import LineRunner
from gateway.batches.steps import Steps
from gateway.batches.store import BatchStore, batch_streams
from gateway.dialects.table import DialectTable
from gateway.keeping import running
from gateway.observe.metrics import GatewayMetrics
from gateway.tenants.tenants import Tenants


class Worker(running.Worker, Protocol):
    async def stop(self) -> None: ...


class Batches:
    """Runs lines and steps of batches between `start` and `stop`."""

    def __init__(self, wire: Wire, limits: BatchLimits, tenants: Tenants, *, tracer: Tracer) -> None:
        self._streams = batch_streams(wire, limits)
        self._store = BatchStore(self._streams, limits)
        self._tenants = tenants
        self._tracer = tracer
        self._workers: list[Worker] = []
        self._loops: list[asyncio.Task[None]] = []

    def connect(
        self, answers: Answers, dialects: DialectTable, metrics: GatewayMetrics, pooled: PooledLines
    ) -> BatchRoutes:
        """Create the routes. Lines run through `answers`, each in its path's dialect, or through `pooled`."""
        models = answers.catalogue

        def models_of(endpoint: str) -> Collection[str]:
            return pooled.names if endpoint in pooled.endpoints else models

        lines = LineRunner(
            self._store,
            answers,
            dialects.batchable,
            self._tenants,
            BatchMetrics(models.labels, metrics),
            pooled=pooled,
            tracer=self._tracer,
        )
        self._workers = [lines, Steps(self._store, models_of=models_of)]
        return BatchRoutes(self._store, (*dialects.batchable, *pooled.endpoints))

    async def start(self) -> None:
        """Start what runs."""
        self._streams.open()
        self._loops = [asyncio.create_task(running.keep_running(worker)) for worker in self._workers]

    async def stop(self) -> None:
        for worker in self._workers:
            await worker.stop()
        await cancel_all(self._loops)  # a hanging pull ends with its streams
        await self._streams.close()
