"""The wiring of a worker that pools: settings, engine, bus, run."""

from __future__ import annotations

import asyncio
import logging
import sys

import torch

from common.bus import connect_bus
from common.settings import ConfigError
from engine.pooling.engine import PoolingConfig, PoolingEngine
from engine.processor import BOUND, settle
from modelfiles.files import is_model
from modelfiles.pooling import is_pooled
from services.runtime.loading import fail, load_settings
from services.runtime.log import start_logging
from services.runtime.memory import keep_what_is_loaded
from services.runtime.models.named import brought
from services.runtime.models.serving import serve
from services.runtime.names import held, made_up, new_incarnation
from services.runtime.settings import no_model
from services.runtime.signals import ending_in_time, until_signalled
from services.runtime.tracer import open_tracer
from services.worker.process import FAILURES, see_only, served_model, worker_name
from services.worker.settings import WorkerServiceSettings
from worker.identity import Identity
from worker.pooling.pooler import Pooler, PoolerSettings
from worker.probe_file import forget
from worker.worker import end_process

log = logging.getLogger("baton.worker")

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 4096, 16384


async def run(settings: WorkerServiceSettings) -> None:
    """Serve until signalled; then finish what waits. Raises ConfigError, ServingError, OSError, ValueError."""
    settings = see_only(settings)
    most, settings = batch_tokens(settings), settings.sized()
    identity = Identity(settings.worker_id or made_up("pool"), new_incarnation())
    async with (
        until_signalled() as stopping,
        ending_in_time(stopping, settings.drain_s),
        connect_bus(settings.nats(), name=identity.worker, owns_streams=False) as bus,
        held(bus, worker_name(bus, identity)) as still_free,
    ):
        engine = await asyncio.to_thread(build_engine, settings)
        tracer = open_tracer(
            settings.otlp_endpoint, service="pool", instance=identity.worker, rest_share=settings.trace_rest_share
        )
        pooler = Pooler(
            bus=bus,
            identity=identity,
            engine=engine,
            settings=PoolerSettings(
                served=await served_model(settings),
                max_batch_tokens=most,
                step_timeout_s=settings.step_timeout_s,
                drain_s=settings.drain_s,
                ready_file=settings.ready_file,
            ),
            end_process=end_process,
            tracer=tracer,
        )
        keep_what_is_loaded()
        await still_free()  # loading takes long
        try:
            await pooler.run(stopping)
        finally:
            await asyncio.to_thread(tracer.close)


def batch_tokens(settings: WorkerServiceSettings) -> int:
    """Tokens of a pass, before `settings` are sized."""
    on_cpu = settings.processor == "cpu"
    return settings.max_batch_tokens or (CPU_BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS)


def build_engine(settings: WorkerServiceSettings) -> PoolingEngine:
    """Load the model. Raises ConfigError, ValueError, OSError."""
    device = torch.device(settings.processor)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
    if not is_model(settings.model):
        raise ConfigError(no_model(settings.model))
    if not is_pooled(settings.model):
        raise ConfigError(
            f"--model {settings.model}: it generates text: serve it with `baton worker`, prefill or decode"
        )
    config = settings.engine()
    return PoolingEngine(
        PoolingConfig(
            model=config.model,
            device=config.device,
            dtype=config.dtype,
            quantization=config.quantization,
            max_model_len=config.max_model_len,
            num_threads=config.num_threads,
            prefix_bytes=config.cache.kv_memory_bytes,
        )
    )


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(WorkerServiceSettings, command="pool", arguments=sys.argv[1:])
        start_logging(service=settings.worker_id or "pool", level=settings.log_level, form=settings.log_format)
        forget(settings.ready_file)
        settings.check_alone()
        settings = settings.model_copy(update={"model": brought(settings.model, log.info)})
        serve(settings.model, settings.worker_id or "pool")
        if settings.processor == "cpu" and (bound := settle()):
            log.info("processor.bound", extra={"variable": BOUND, "instructions": bound})
        asyncio.run(run(settings))
    except FAILURES as error:
        return fail(error)
    return 0
