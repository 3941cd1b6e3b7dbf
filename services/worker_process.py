"""The wiring that the three worker services share: settings -> engine and transport -> bus, store, peers -> roles -> run."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from common.bus import connect_bus
from common.config import ConfigError, WorkerServiceSettings, fail, load_settings, see_one_gpu
from common.errors import ServingError
from common.peers import Peers
from common.store import connect_store
from common.telemetry import start_logging
from decode.role import DecodeRole
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FAKE_VOCAB, FakeCosts, FakeEngine
from engine.fake_faults import FakeFaults
from engine.loader import tokenizer_fingerprint
from kvtransfer.select import open_transport
from kvtransfer.transport import Transport
from prefill.role import PrefillRole
from services.connections import nats_settings, redis_settings
from services.leaving import ending_in_time, until_signalled
from services.settled import keep_what_is_loaded
from services.tracing import open_tracer
from worker.device import step_targets
from worker.host import WorkerEngine, WorkerHost, WorkerSettings
from worker.ready import forget

log = logging.getLogger("baton.worker")


async def run(settings: WorkerServiceSettings, roles: Sequence[str]) -> None:
    """Serve `roles`, which may change meanwhile, until signalled; then drain."""
    settings = sized(see_only(settings))
    if settings.transport == "local" and "decode" not in roles:
        raise ConfigError("--transport local: a prefill worker has to hand its KV over; use another one")
    worker_id = settings.worker_id or f"{'-'.join(roles)}-{secrets.token_hex(4)}"
    async with until_signalled() as stopping, ending_in_time(stopping, settings.drain_s):
        transport = open_transport(settings.kv_transport, host=settings.transport_host)
        engine = await asyncio.to_thread(build_engine, settings, transport)
        step_target_ms, alone_target_ms = settings.step_target_ms, 0.0
        if settings.device != "cpu" and not step_target_ms:
            step_target_ms, alone_target_ms = step_targets(engine.pass_ms)
        async with (
            connect_bus(nats_settings(settings), name=worker_id, owns_streams=False) as bus,
            connect_store(redis_settings(settings)) as store,
        ):
            tracer = open_tracer(
                settings.otlp_endpoint,
                service="-".join(roles),
                instance=worker_id,
                rest_share=settings.trace_rest_share,
            )
            peers = Peers()
            await peers.start(bus)
            host = WorkerHost(
                bus=bus,
                store=store,
                peers=peers,
                engine=engine,
                transport=transport,
                settings=WorkerSettings(
                    served_model=settings.served_name,
                    tokenizer_fingerprint=_tokenizer_fingerprint(settings),
                    max_batch_tokens=max(settings.max_batch_tokens, settings.max_sequences),
                    max_sequences=settings.max_sequences,
                    step_target_ms=step_target_ms,
                    alone_target_ms=alone_target_ms,
                    step_timeout_s=settings.step_timeout_s or (120.0 if settings.device == "cpu" else 60.0),
                    drain_s=settings.drain_s,
                    ready_file=settings.ready_file,
                ),
                worker_id=worker_id,
                incarnation=secrets.randbits(63),
                tracer=tracer,
            )
            host.attach(DecodeRole(host), active="decode" in roles)
            host.attach(PrefillRole(host, max_requests=settings.max_prefills), active="prefill" in roles)
            keep_what_is_loaded()
            await host.run(stopping)
            await peers.close()
            await asyncio.to_thread(tracer.close)


def see_only(settings: WorkerServiceSettings) -> WorkerServiceSettings:
    """Make this process see one GPU, its own, as `cuda:0`: a kernel can't be launched on another by mistake."""
    if not settings.device.startswith("cuda:"):
        return settings
    see_one_gpu(int(settings.device.removeprefix("cuda:")), count=torch.cuda.device_count())
    return settings.model_copy(update={"device": "cuda:0"})


def sized(settings: WorkerServiceSettings) -> WorkerServiceSettings:
    """Settings with the sizes that were left to the device."""
    on_cpu = settings.device == "cpu"
    return settings.model_copy(
        update={
            "max_batch_tokens": settings.max_batch_tokens or (512 if on_cpu else 8192),
            "max_sequences": settings.max_sequences or (64 if on_cpu else 256),
        }
    )


def build_engine(settings: WorkerServiceSettings, transport: Transport) -> WorkerEngine:
    """Load the model (or the fake device) with its pool in the transport's memory. Raises ConfigError."""
    device = torch.device(settings.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
    config = EngineConfig(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kv_memory_bytes=settings.kv_memory_mb << 20 or None,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len or None,
        max_batch_tokens=settings.max_batch_tokens,
        max_sequences=settings.max_sequences,
        num_threads=settings.threads,
    )
    if settings.fake:
        costs = FakeCosts(step_ms=settings.fake_step_ms, prefill_token_ms=settings.fake_token_us / 1000)
        return FakeEngine(
            config,
            vocab_size=_vocab_size(settings.model),
            costs=costs,
            faults=FakeFaults(settings.fake_faults),
            allocate=transport.allocate,
        )
    if not (settings.model / "config.json").is_file():
        raise ConfigError(f"--model {settings.model}: no config.json there; give a Hugging Face model folder")
    return Engine(config, allocate=transport.allocate)


def _vocab_size(model: Path) -> int:
    """What the gateway's tokenizer of this model may say to a fake device. Raises OSError, ValueError."""
    file = model / "config.json"
    return int(json.loads(file.read_text()).get("vocab_size") or FAKE_VOCAB) if file.is_file() else FAKE_VOCAB


def _tokenizer_fingerprint(settings: WorkerServiceSettings) -> str:
    file = settings.model / "tokenizer.json"
    return tokenizer_fingerprint(file) if file.is_file() else ""


def main(service: str, roles: Sequence[str]) -> int:
    """Entry point of a worker service; returns the exit code."""
    try:
        settings = load_settings(WorkerServiceSettings, command=service, arguments=sys.argv[1:])
        start_logging(service=settings.worker_id or service, level=settings.log_level, form=settings.log_format)
        forget(settings.ready_file)
        asyncio.run(run(settings, roles))
    except (ConfigError, ServingError, OSError, ValueError, MemoryError) as error:
        return fail(error)
    return 0
