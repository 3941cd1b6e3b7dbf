"""The record that `baton up` writes for tools (`services.runtime.running`), and the keys that it was given."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import VERSION
from common.access import write_secret
from modelfiles.gguf import is_gguf
from modelfiles.pooling import EMBED, MAXSIM, Pooling, read_pooling
from services.runtime.running import FILE, Running, announced, birth_of
from services.runtime.settings import Settings
from services.up.checks import command
from services.up.servers import Reach
from services.up.settings import UpSettings

KEY_FILE, ADMIN_FILE = "gateway.key", "admin.key"
TOOLS = {
    "chat": "talk to it",
    "embed": "vectors of a file's lines",
    "top": "workers and gateways, live",
    "trace": "where the time of a request went",
    "bench": "latencies and throughput under load",
    "doctor": "what is wrong, and what to do",
}
CHAT = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
VECTOR = '"input": "What is the capital of France?"'
RANK = '"query": "What is the capital of France?", "documents": ["Paris is the capital of France.", "The cat sat."]'
TEXT = '"prompt": "The capital of France is", "max_tokens": 16'
# Settings for tools that observe NATS and Redis.
LOOKS_ON = tuple(name for name in Settings.model_fields if name.startswith(("nats_", "redis_")))


def announce(
    held: contextlib.ExitStack, settings: UpSettings, reach: Reach, *, urls: Sequence[str], data: Path
) -> None:
    """Publish the record until `held` closes. Keys are in files of their own for as long. `urls`: see `Stack`."""
    users = data / "users"
    several, (name, folder) = len(settings.folders) > 1, next(iter(settings.folders.items()))
    running = Running(
        url=urls[0],
        own_urls=list(urls[1:]),
        pid=os.getpid(),
        born=birth_of(os.getpid()),
        started_unix=round(time.time(), 3),
        release=VERSION,
        model="" if several else str(folder.absolute() if is_gguf(folder) else folder.resolve()),
        served_model_name="" if several else name,
        observer={name: str(getattr(settings, name)) for name in LOOKS_ON} | reach.settings("observer"),
        api_key_file=_kept(held, users / KEY_FILE, next(iter(settings.keys), "")),
        admin_key_file=_kept(held, users / ADMIN_FILE, settings.admin_key or settings.orders_key),
        certificate=str(Path(settings.tls_cert).resolve()) if settings.tls_cert else "",
        logs=str(data / "logs"),
    )
    held.enter_context(announced(running, data))


def forget(data: Path) -> None:
    """Remove the leftovers of a killed `baton up` in this folder."""
    for file in (data / FILE, data / "users" / KEY_FILE, data / "users" / ADMIN_FILE):
        file.unlink(missing_ok=True)


def welcome(
    settings: UpSettings, url: str, data: Path, *, models: Sequence[Mapping[str, Any]] = (), seconds: float
) -> str:
    """The text printed when all is ready: address, a first request, tools. `models`: see `models_of`."""
    baton = command()
    talkers = [str(model["id"]) for model in models if "chat" in model["capabilities"]]
    can_chat = bool(talkers) or not models  # without a key here the models can't be listed
    model = (talkers or list(settings.folders))[0]
    unused = {"chat": not can_chat, "embed": not settings.pooling, "bench": not settings.generating}
    tools = [(name, about) for name, about in TOOLS.items() if not unused.get(name)]
    lines = [
        f"\nBaton serves {', '.join((*settings.folders, *settings.patterns))} at {url} ({seconds:.1f} s): "
        f"{', '.join(_workers(settings))}, transport {settings.kv_transport}, logs in {data / 'logs'}",
        *(line for each in models for line in _of_note(each)),
        f"\n  {_first_request(settings, url, data, model, can_chat=can_chat)}\n",
        *_doors(settings, url, data),
        *(f"  {baton} {name:<{13 - len(baton)}} {about}" for name, about in tools),
    ]
    if settings.own_ports:
        ports = ", ".join(map(str, settings.own_ports))
        lines.append(
            f"\n{settings.gateways} gateways share port {settings.port}; each has its own, too, for /metrics: {ports}."
        )
    if settings.tenants and not settings.keys:
        lines.append(f"\nKEY is a key of {settings.tenants}; the tools take it from BATON_API_KEY.")
    return "\n".join((*lines, "\nCtrl-C drains and stops everything."))


def _workers(settings: UpSettings) -> Iterator[str]:
    """The workers of each model that generates, and of each that doesn't."""
    generating = f"{settings.prefill} prefill and {settings.decode} decode"
    for models, has in ((settings.generating, generating), (settings.pooling, f"{settings.decodes.least} pool")):
        if models:
            yield f"{has} for each of {len(models)}" if len(models) > 1 else has


def _doors(settings: UpSettings, url: str, data: Path) -> Iterator[str]:
    """Lines about further entry points: the page, another port, a key."""
    yield f"  console        {url}/"
    if settings.ollama_port:
        yield f"  Ollama clients port {settings.ollama_port} answers them, too"
    if settings.grpc_port:
        yield f"  gRPC           port {settings.grpc_port} (KServe's protocol)"
    if settings.orders_key:
        yield f"  admin key      {data / 'users' / ADMIN_FILE} (orders to workers, keys)"


def _of_note(model: Mapping[str, Any]) -> Iterator[str]:
    """Lines about shortcomings of a model here: no chat template, or a KV pool smaller than its context, with the remedy."""
    if model["capabilities"] == ["completion"]:
        yield f"\n{model['id']} has no chat template: it continues text."
    if whole := model["whole_model_len"]:
        served = f"\n{model['id']} is served with {model['max_model_len']} of its {whole} tokens of context"
        yield f"{served}: --kv-memory-mb {model['whole_kv_memory_mb']} holds all, where there is so much memory."


def _first_request(settings: UpSettings, url: str, data: Path, model: str, *, can_chat: bool) -> str:
    """A `curl` line with the key of this `up`, or a placeholder."""
    key = f"$(cat {data / 'users' / KEY_FILE})" if settings.keys else "$KEY" if settings.tenants else ""
    header = f' -H "authorization: Bearer {key}"' if key else ""
    path, asked = ("chat/completions", CHAT) if can_chat else ("completions", TEXT)
    if not can_chat and model in settings.pooling:
        path, asked = _of_pooling(read_pooling(settings.pooling[model]))
    body = f'{{"model": "{model}", {asked}}}'
    return f"curl {url}/v1/{path} -H 'content-type: application/json'{header} -d '{body}'"


def _of_pooling(pooling: Pooling) -> tuple[str, str]:
    """Path and body of what such a model is for."""
    if EMBED in pooling.works:
        return "embeddings", VECTOR
    return ("rerank", RANK) if MAXSIM in pooling.works or len(pooling.labels) == 1 else ("classify", VECTOR)


def _kept(held: contextlib.ExitStack, file: Path, key: str) -> str:
    """The name of a file that holds the key until `held` closes; "" without a key."""
    if not key:
        return ""
    write_secret(file, key + "\n")
    held.callback(file.unlink, missing_ok=True)
    return str(file)
