"""The ranks of a worker: this process, which leads, and a process for each further one."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeVar

import msgspec

from common.settings import ConfigError
from engine.foreign import is_foreign
from engine.parallel.followers import Followers
from engine.parallel.group import RankLostError
from engine.parallel.ranks import ONE_RANK, Ranks
from engine.resolving import read_config, staged_model
from engine.spec.ranks import for_rank
from kvtransfer.ranks.leader import RankedTransport
from kvtransfer.transport import TransferError, Transfers, Transport, open_transport
from kvtransfer.transports import reaches_others
from modelfiles.files import is_model
from services.rank.asked import Asked
from services.rank.cores import listed, stay_near
from services.rank.devices import held_back, ranks_on
from services.runtime.commands import service_environment
from services.runtime.loading import fail
from services.runtime.settings import no_model
from services.worker.settings import WorkerServiceSettings
from worker.worker import EXIT_DEVICE_BROKEN, WorkerEngine, let_go

log = logging.getLogger("baton.ranks")

COMMAND = (sys.executable, "-m", "services.rank")
LOOK_S = 0.25
T = TypeVar("T")


def check_ranks(settings: WorkerServiceSettings) -> None:
    """Raise ConfigError or ValueError for what ranks can't do, the model among it, before anything is started for them."""
    settings.check_ranks()
    if settings.processes == 1:
        return
    config, stages = settings.engine(), settings.pipeline_parallel_size
    if not is_model(settings.model):
        raise ConfigError(no_model(settings.model))
    is_whole = is_foreign(config)  # which raises for ranks
    config.check_stages(stages, is_foreign=is_whole)
    if not is_whole:
        staged_model(config, stages)
        for_rank(read_config(config), 0, settings.tensor_parallel_size)


@dataclass(frozen=True, slots=True)
class Led:
    """A worker's ranks, and the transport that moves the blocks of all."""

    ranks: Ranks
    transport: Transport
    followers: Followers | None = None

    async def loaded(self, load: Callable[[], T]) -> T:
        """Load in a thread, see `asyncio.to_thread`; end this process if a further rank ends meanwhile."""
        if self.followers is None:
            return await asyncio.to_thread(load)
        loading = asyncio.ensure_future(asyncio.to_thread(load))
        while not loading.done() and not self.followers.problem():
            await asyncio.wait([loading], timeout=LOOK_S)
        failure = loading.exception() if loading.done() else None
        if loading.done() and not isinstance(failure, RankLostError):
            return await loading
        return await self._end(self.followers.problem() or str(failure), self.followers)

    async def _end(self, reason: str, followers: Followers) -> NoReturn:
        """End this process, since a rank ended. No thread that loads can be stopped, so none is waited for."""
        log.critical("ranks.lost", extra={"reason": reason})
        code = fail(reason)
        await let_go(self.transport)
        os._exit(code if followers.refused else EXIT_DEVICE_BROKEN)

    async def opened(self, engine: WorkerEngine, incarnation: int) -> Transfers:
        """Open the transport on the pools of all ranks."""
        transport, pool = self.transport, engine.kv
        try:
            region = await transport.open(pool, engine.layout, incarnation)
        except TransferError as error:  # a rank ended since it loaded
            if self.followers is None:
                raise
            await self._end(self.followers.problem() or str(error), self.followers)
        wide = None
        if not self.ranks.leads and reaches_others(transport.name):
            wide = RankedTransport.beside(transport, pool, engine.layout)
        return Transfers(transport=transport, region=region, wide=wide)


@asynccontextmanager
async def led(settings: WorkerServiceSettings, worker: str) -> AsyncIterator[Led]:
    """Start the further ranks, and end them at last. Raises OSError."""
    transport = open_transport(settings.kv_transport, host=settings.transport_host)
    if settings.processes == 1:
        try:
            yield Led(ONE_RANK, transport)
        finally:
            await transport.close()  # also of a worker that never ran
        return
    asked = Asked(
        worker=worker,
        transport=settings.kv_transport,
        host=settings.transport_host,
        on_gpu=settings.processor.startswith("cuda"),
        stages=settings.pipeline_parallel_size,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    followers = Followers(
        settings.processes,
        [*COMMAND, msgspec.json.encode(asked).decode()],
        environment=service_environment(),
    )
    log.info("ranks.started", extra={"ranks": settings.processes, "pids": followers.pids})
    # Further ranks begin with the processors that this one was allowed, and choose theirs among them.
    if settings.processor == "cpu" and (own := stay_near(0, settings.processes)):
        log.info("rank.near", extra={"rank": 0, "processors": listed(own)})
    try:
        ranks = ranks_on(followers.group, settings.processor, stages=asked.stages)
        ranks = replace(ranks, followers=followers)
        if asked.on_gpu and asked.stages == 1:
            ranks = replace(ranks, held_back=partial(held_back, followers.group, settings.processor))
        transport = RankedTransport(transport, followers.channels)
        yield Led(ranks, transport, followers)
    finally:
        await transport.close()
        await asyncio.to_thread(followers.close)
