"""The ranks of a worker: this process, which leads, and a process for each further one."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeVar

import msgspec
import torch

from common import VERSION
from common.access import read_login
from common.settings import ConfigError
from engine.checkpoint.fingerprint import files_fingerprint
from engine.foreign import is_foreign
from engine.parallel.followers import Followers
from engine.parallel.group import RankLostError
from engine.parallel.nodes.bridged import Bridged
from engine.parallel.nodes.joining import Joined
from engine.parallel.nodes.wire import key_of
from engine.parallel.ranks import ONE_RANK, Ranks
from engine.resolving import read_config, resolve_dtype, staged_model
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
from services.worker.nodes import met
from services.worker.settings import WorkerServiceSettings
from worker.worker import EXIT_DEVICE_BROKEN, WorkerEngine, let_go

log = logging.getLogger("baton.ranks")

COMMAND = (sys.executable, "-m", "services.rank")
BRIDGE = (sys.executable, "-m", "services.bridge")
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
async def led(settings: WorkerServiceSettings, worker: str, stopping: asyncio.Event) -> AsyncIterator[Led]:
    """Start the further ranks, and end them at last. Raises OSError, ConfigError.

    Ranks on other hosts join before; who is told to stop meanwhile ends with code 0.
    """
    transport = open_transport(settings.kv_transport, host=settings.transport_host)
    if settings.processes == 1:
        try:
            yield Led(ONE_RANK, transport)
        finally:
            await transport.close()  # also of a worker that never ran
        return
    asked = asked_of(settings, worker)
    joined, bridge = await _joined(settings, stopping)
    followers = Followers(
        settings.processes,
        [*COMMAND, msgspec.json.encode(asked).decode()],
        environment=service_environment(),
        joined=joined,
        bridge=bridge,
    )
    is_well = False
    log.info("ranks.started", extra={"ranks": settings.processes, "pids": followers.pids})
    # Further ranks begin with the processors that this one was allowed, and choose theirs among them.
    if settings.processor == "cpu" and (own := stay_near(0, settings.processes_here)):
        log.info("rank.near", extra={"rank": 0, "processors": listed(own)})
    try:
        ranks = ranks_on(followers.group, settings.processor, stages=asked.stages)
        ranks = replace(ranks, followers=followers)
        if asked.on_gpu and asked.stages == 1:
            ranks = replace(ranks, held_back=partial(held_back, followers.group, settings.processor))
        transport = RankedTransport(transport, followers.channels)
        yield Led(ranks, transport, followers)
        is_well = True
    finally:
        await transport.close()
        await asyncio.to_thread(followers.close, is_well=is_well)


def asked_of(settings: WorkerServiceSettings, worker: str, *, first: int | None = None) -> Asked:
    """The first words to this host's further ranks, see `Asked`. `first`: on a further node."""
    model, drafter = (settings.model, settings.drafter) if first is not None else (None, None)
    return Asked(
        worker=worker,
        transport=settings.kv_transport,
        host=settings.transport_host,
        on_gpu=settings.processor.startswith("cuda"),
        stages=settings.pipeline_parallel_size,
        first=first or 0,
        here=settings.processes_here,
        model=str(model.absolute()) if model is not None else "",
        drafter=str(drafter.absolute()) if drafter is not None else "",
        log_level=settings.log_level,
        log_format=settings.log_format,
    )


async def _joined(
    settings: WorkerServiceSettings, stopping: asyncio.Event
) -> tuple[Sequence[Joined], Callable[[int], Bridged] | None]:
    """The other nodes, once all have joined, and what starts the bridge to them; nobody on a single host."""
    if (nodes := settings.nodes) is None:
        return (), None
    places = nodes.places(settings.processes)
    log.info("nodes.awaited", extra={"nodes": nodes.count, "address": nodes.address})
    facts = await asyncio.to_thread(facts_of, settings)
    joined = await asyncio.to_thread(met, nodes, places, secret_of(settings), facts, stopping.is_set)
    if not joined:
        raise SystemExit(0)
    width = settings.tensor_parallel_size
    return joined, lambda memory: Bridged(
        BRIDGE, memory, places, joined, width=width, environment=service_environment()
    )


def secret_of(settings: WorkerServiceSettings) -> bytes:
    """The key that nodes prove to have. Raises ConfigError."""
    file = settings.nats().credentials
    assert file is not None, "checked"
    login = read_login(file)
    return key_of(f"{login.user}:{login.password}")


def facts_of(settings: WorkerServiceSettings) -> dict[str, str]:
    """Return what must be the same on all nodes, by the option that says it. It reads files. Raises ValueError, OSError."""
    config = settings.engine()
    dtype = resolve_dtype(config.dtype, torch.device(config.device), read_config(config).dtype)
    return {
        "release": VERSION,
        "--model": files_fingerprint(settings.model),
        "--pipeline-parallel-size": str(settings.pipeline_parallel_size),
        "--tensor-parallel-size": str(settings.tensor_parallel_size),
        "--device": settings.processor.partition(":")[0],
        "--dtype": dtype,
        "--speculative-config": files_fingerprint(settings.drafter) if settings.drafter is not None else "none",
        "--quantization": settings.quantization,
        "--kv-cache-dtype": settings.kv_cache_dtype,
        "--transport": settings.kv_transport,
    }
