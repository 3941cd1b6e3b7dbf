"""The Batch API of one gateway, as a whole: what has to be started and stopped with it."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from common.bus import NatsSettings
from common.lifecycle import cancel_all
from common.tracing import Tracer
from gateway.batches.metrics import BatchMetrics
from gateway.batches.records import BatchLimits
from gateway.batches.routes import BatchRoutes
from gateway.batches.runner import LineRunner
from gateway.batches.steps import Steps
from gateway.batches.store import BatchStore
from gateway.batches.streams import BatchStreams
from gateway.dialect import Dialect
from gateway.metrics import GatewayMetrics
from gateway.tenants import Tenants

log = logging.getLogger("baton.batches")

AGAIN_S = 1.0


class Worker(Protocol):
    """What runs until it is told to stop."""

    async def run(self) -> None: ...

    async def stop(self) -> None: ...


class Batches:
    """Runs lines and looks after batches between `start` and `stop`."""

    def __init__(
        self, nats: NatsSettings, limits: BatchLimits, tenants: Tenants, *, tracer: Tracer, trace_share: float
    ) -> None:
        self._streams = BatchStreams(nats, store_bytes=limits.store_bytes, keep_s=limits.keep_s)
        self._store = BatchStore(self._streams, limits)
        self._tenants = tenants
        self._tracer = tracer
        self._trace_share = trace_share
        self._workers: list[Worker] = []
        self._loops: list[asyncio.Task[None]] = []

    def connect(self, dialect: Dialect, metrics: GatewayMetrics) -> BatchRoutes:
        """Lines run through `dialect`. Return the routes."""
        lines = LineRunner(
            self._store,
            dialect,
            self._tenants,
            BatchMetrics(dialect.served_model, metrics),
            tracer=self._tracer,
            trace_share=self._trace_share,
        )
        self._workers = [lines, Steps(self._store, model=dialect.served_model)]
        return BatchRoutes(self._store)

    async def start(self) -> None:
        """Connect and begin. Raises UnavailableError when there is no NATS."""
        await self._streams.open()
        self._loops = [asyncio.create_task(keep_running(worker)) for worker in self._workers]

    async def stop(self) -> None:
        """Give back what runs, for other gateways to take."""
        for worker in self._workers:
            await worker.stop()
        await cancel_all(self._loops)  # a pull that is left behind ends with the connection
        await self._streams.close()


async def keep_running(worker: Worker) -> None:
    """Run a worker until it was told to stop: a mistake of ours costs a second, not all batches of this gateway."""
    while True:
        try:
            return await worker.run()
        except Exception:
            log.exception("batches.crashed")
            await asyncio.sleep(AGAIN_S)
