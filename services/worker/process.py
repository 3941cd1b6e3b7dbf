"""The wiring of the three worker services: settings, engine and transport, bus, store and peers, roles, run."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from common import subjects
from common.blocks import tokenizer_fingerprint
from common.bus import Bus, connect_bus
from common.errors import ServingError
from common.messages import ANYBODY_THERE, worker_reply_decoder, worker_state_decoder
from common.peers import Peers
from common.settings import ConfigError
from common.store import connect_store
from decode.drafts.drafters import DRAFTERS
from decode.drafts.drafting import Drafting
from decode.drafts.speculation import NO_SPECULATION, Speculation
from decode.role import DecodeRole
from engine.checkpoint.fingerprint import files_fingerprint
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake.engine import FAKE_VOCAB, FakeCosts, FakeEngine
from engine.foreign import is_foreign
from engine.parallel.ranks import ONE_RANK, Ranks
from engine.processor import BOUND, settle
from kvtransfer.transport import Transport
from kvtransfer.transports import reaches_others
from modelfiles.files import CONFIG, TOKENIZER, forget_files, is_model, num_tokens, read_file, read_json
from modelfiles.pooling import is_pooled
from prefill.role import PrefillRole
from services.rank.cores import physical_cores
from services.rank.gpu import see_gpus
from services.runtime.checks.fit import check_needs
from services.runtime.loading import fail, load_settings
from services.runtime.log import start_logging
from services.runtime.memory import keep_what_is_loaded
from services.runtime.models.named import brought
from services.runtime.models.serving import serve
from services.runtime.names import ANSWER_S, Name, held, made_up, new_incarnation
from services.runtime.settings import no_model
from services.runtime.signals import ending_in_time, parked_by_signals, until_signalled
from services.runtime.tracer import open_tracer
from services.worker.further import serve_node
from services.worker.host_share import HostMB
from services.worker.kv_events import KVEventsConfig
from services.worker.ranks import check_ranks, led
from services.worker.settings import WorkerServiceSettings
from services.worker.speculative import SpeculativeConfig
from worker.device.step_policy import StepTargets, TargetRatios
from worker.identity import Identity, Messenger
from worker.probe_file import forget
from worker.settings import ModelIdentity, WorkerSettings
from worker.tier.building import host_store
from worker.tier.disk import Disk
from worker.tier.host_store import HostStore
from worker.tier.ranks.asking import Asking
from worker.tier.settings import DiskSettings, HostSettings
from worker.worker import Worker, WorkerEngine

log = logging.getLogger("baton.worker")

FAILURES = (ConfigError, ServingError, OSError, ValueError, MemoryError)
ROLES = {"prefill": ("prefill",), "decode": ("decode",), "worker": ("decode", "prefill")}


async def run(settings: WorkerServiceSettings, roles: Sequence[str], lender: Engine | None = None) -> None:
    """Serve `roles`, which may change later, until signalled; then drain. `lender`: see `main`."""
    settings = see_only(settings).sized()
    if not reaches_others(settings.kv_transport) and "decode" not in roles:
        raise ConfigError(
            f"--transport {settings.kv_transport}: a prefill worker has to hand its KV over; use another one"
        )
    check_ranks(settings)
    drafts = SpeculativeConfig.parse(settings.speculative_config)
    worker_id = settings.worker_id or made_up(roles[0] if len(roles) == 1 else "worker")
    identity = Identity(worker_id, new_incarnation())
    async with (
        until_signalled() as stopping,
        ending_in_time(stopping, settings.drain_s),
        connect_bus(settings.nats(), name=worker_id, owns_streams=False) as bus,
        held(bus, worker_name(bus, identity)) as still_free,
        led(settings, worker_id, stopping) as lead,
    ):
        engine = await lead.loaded(partial(build_engine, settings, lead.transport, lender, lead.ranks))
        targets = StepTargets(settings.step_target_ms)
        if settings.processor != "cpu" and not settings.step_target_ms:
            targets = TargetRatios().targets(engine.pass_ms)
        async with connect_store(settings.redis()) as store:
            tracer = open_tracer(
                settings.otlp_endpoint,
                service="-".join(roles),
                instance=worker_id,
                rest_share=settings.trace_rest_share,
            )
            events = KVEventsConfig.parse(settings.kv_events_config)
            disk = DiskSettings.parse(settings.kv_disk)
            peers = Peers()
            await peers.start(bus)
            transfers = await lead.opened(engine, identity.incarnation)
            ask = Asking.of(transfers.transport)
            worker = Worker(
                messenger=Messenger(identity=identity, bus=bus, peers=peers),
                store=store,
                engine=engine,
                transfers=transfers,
                settings=WorkerSettings(
                    served=await served_model(settings),
                    max_batch_tokens=max(settings.max_batch_tokens, settings.max_sequences),
                    max_sequences=settings.max_sequences,
                    stages=settings.pipeline_parallel_size,
                    step_targets=targets,
                    step_timeout_s=settings.step_timeout_s,
                    drain_s=settings.drain_s,
                    kv_host=await asyncio.to_thread(_host_store, settings, engine),
                    kv_disk=None if disk is None else await asyncio.to_thread(Disk.claim, disk, engine.layout, ask),
                    kv_events=None if events is None else events.settings(worker=worker_id, model=settings.served_name),
                    ready_file=settings.ready_file,
                    pulls=settings.pulls,
                    kv_retention=settings.kv_retention,
                    drafter="" if drafts is None else drafts.method,
                ),
                tracer=tracer,
            )
            worker.attach(
                DecodeRole(
                    worker.context, speculation=_speculation(drafts, worker, drafts_itself=bool(engine.draft_ms))
                ),
                active="decode" in roles,
            )
            worker.attach(PrefillRole(worker.context), active="prefill" in roles)
            forget_files()
            keep_what_is_loaded()
            await still_free()  # loading takes long
            with parked_by_signals(worker.parking.ask):
                await worker.run(stopping)
            await peers.close()
            await asyncio.to_thread(tracer.close)


def worker_name(bus: Bus, identity: Identity) -> Name:
    """The name that a worker holds on the bus."""
    subject = subjects.worker(identity.worker)
    return Name(
        id=identity.worker,
        incarnation=identity.incarnation,
        flag="--worker-id",
        beats=subjects.heartbeat(identity.worker),
        beat_decoder=worker_state_decoder,
        ask=lambda: bus.request(subject, ANYBODY_THERE, worker_reply_decoder, timeout_s=ANSWER_S),
    )


def _host_store(settings: WorkerServiceSettings, engine: WorkerEngine) -> HostStore | None:
    host = HostMB.parse(settings.kv_host_mb)
    asked = HostSettings(host.resolved() << 20, host.is_shared)
    return host_store(asked, engine.layout, fingerprint=engine.fingerprint, num_ranks=settings.processes)


def _speculation(config: SpeculativeConfig | None, worker: Worker, *, drafts_itself: bool) -> Speculation:
    if config is None:
        return NO_SPECULATION
    drafter, grammars = DRAFTERS[config.method](config.lookup), worker.context.model.grammars
    grammars.looks_ahead = True
    if not config.adapts:
        return Drafting(drafter, most=config.most, forced=grammars.forced)
    cost = worker.context.passes.budget.step_cost
    return Drafting(
        drafter,
        most=config.most,
        step_ms=cost.rows.ms,
        wait_ms=cost.waits.ms,
        is_paid=drafts_itself,
        forced=grammars.forced,
    )


def see_only(settings: WorkerServiceSettings) -> WorkerServiceSettings:
    """Show this process a single GPU as `cuda:0`, so that no kernel runs on another by mistake; a leader, those of all."""
    processes = settings.processes_here
    if not settings.device.startswith("cuda:") and (processes == 1 or settings.device != "cuda"):
        return settings
    first = int(settings.device.removeprefix("cuda").removeprefix(":") or 0)
    see_gpus(first, processes, count=torch.cuda.device_count())
    return settings.model_copy(update={"device": "cuda:0"})


def build_engine(
    settings: WorkerServiceSettings, transport: Transport, lender: Engine | None = None, ranks: Ranks = ONE_RANK
) -> WorkerEngine:
    """Load the model (or the fake device) with its pool in the transport's memory. Raises ConfigError."""
    device = torch.device(settings.processor)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
    config = settings.engine()
    if fake := settings.fake:
        costs = FakeCosts(step_ms=fake.step_ms, prefill_token_ms=fake.token_us / 1000)
        return FakeEngine(
            config,
            vocab_size=_vocab_size(settings.model),
            costs=costs,
            allocate=transport.allocate,
        )
    if not is_model(settings.model):
        raise ConfigError(no_model(settings.model))
    if is_pooled(settings.model):
        raise ConfigError(
            f"--model {settings.model}: it makes vectors or scores, and generates nothing: use `baton pool`"
        )
    if lender is not None and (ranks.leads or lender.config != _lending(config)):  # it has the whole model
        lender = None
    if device.type == "cuda":
        _check_fit(config, stages=ranks.stage.count)
    if ranks.leads:  # which may have fewer processors by now
        config = replace(config, num_threads=min(config.num_threads, physical_cores()))
    return Engine(config, allocate=transport.allocate, lender=lender, ranks=ranks)


def _check_fit(config: EngineConfig, *, stages: int) -> None:
    """Log what a GPU needs for the model, or its first stage, before weights are read. Raises ConfigError if they don't fit."""
    free, _ = torch.cuda.mem_get_info(config.device)
    if (fit := check_needs(config, free, stages=stages)) is None:
        return
    if fit.level == "fail":
        raise ConfigError(f"--model {config.model}: {fit.said}")
    log.info("model.fit", extra={"level": fit.level, "said": fit.said})


def build_lender(service: str, variables: Mapping[str, str]) -> Engine | None:
    """An engine that lends its weights to such workers; None if each loads its own, and reports what is wrong with them."""
    try:
        settings = load_settings(WorkerServiceSettings, command=service, arguments=[], environment=variables).sized()
        config = settings.engine()
        return None if settings.fake or is_foreign(config) or settings.processes > 1 else Engine(_lending(config))
    except FAILURES:
        return None


def _lending(config: EngineConfig) -> EngineConfig:
    """An engine with the same weights, in its caller's thread alone. Its pool is never written, so it takes no memory."""
    return replace(config, cache=replace(config.cache, num_blocks=None, kv_memory_bytes=None), num_threads=1)


def _vocab_size(model: Path) -> int:
    """The size of the tokenizer, for a fake device. Raises OSError, ValueError."""
    return int(read_json(model, CONFIG).get("vocab_size") or num_tokens(model) or FAKE_VOCAB)


async def served_model(settings: WorkerServiceSettings) -> ModelIdentity:
    """The model's name and the fingerprints of its files, as others see them. Raises OSError, ValueError."""
    raw = await asyncio.to_thread(read_file, settings.model, TOKENIZER)
    return ModelIdentity(
        settings.served_name,
        tokenizer_fingerprint=tokenizer_fingerprint(raw) if raw is not None else "",
        files_fingerprint=await asyncio.to_thread(files_fingerprint, settings.model),
    )


def main(service: str, lender: Engine | None = None) -> int:
    """Entry point of a worker service, one of `ROLES`; returns the exit code. `lender`: an engine with loaded weights."""
    try:
        settings = load_settings(WorkerServiceSettings, command=service, arguments=sys.argv[1:])
        start_logging(service=settings.worker_id or service, level=settings.log_level, form=settings.log_format)
        forget(settings.ready_file)
        settings.check_ranks()
        settings = settings.model_copy(
            update={"model": brought(settings.model, log.info, text_alone=bool(settings.fake))}
        )
        serve(settings.model, settings.worker_id or service)
        if settings.processor == "cpu" and (bound := settle()):
            log.info("processor.bound", extra={"variable": BOUND, "instructions": bound})
        if (nodes := settings.nodes) is not None and nodes.number:
            return serve_node(see_only(settings).sized(), nodes)
        asyncio.run(run(settings, ROLES[service], lender))
    except FAILURES as error:
        return fail(error)
    return 0
