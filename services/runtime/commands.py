"""Baton's commands: package, one-line description, settings class. Imports little, so that help is quick."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common import PREFIX

if TYPE_CHECKING:
    from pydantic import BaseModel


ROOT = Path(__file__).resolve().parents[2]
HELP = ("-h", "--help", "--help-all")
SPINS = "GOMP_SPINCOUNT"  # GNU's OpenMP: how long a thread looks for work


class Command(NamedTuple):
    """A package with a `__main__`, and its settings as module:class ("": none)."""

    package: str
    about: str
    settings: str = ""


COMMANDS = {
    "up": Command(
        "services.up",
        "everything on this machine: NATS, Redis, gateway, prefill and decode workers",
        "services.up.settings:UpSettings",
    ),
    "chat": Command("cli.chat", "talk to a gateway in the terminal", "cli.chat.settings:ChatSettings"),
    "top": Command(
        "cli.top", "workers, requests, tenants and events, live in the terminal", "cli.top.settings:TopSettings"
    ),
    "trace": Command("cli.trace", "where the time of a recent request went", "cli.trace.settings:TraceSettings"),
    "bench": Command(
        "cli.bench",
        "load for a gateway, or any OpenAI-compatible server: latencies, throughput, goodput",
        "cli.bench.settings:BenchSettings",
    ),
    "batch": Command(
        "cli.batch", "batches: submit a file, watch it, get the answers", "cli.batch.settings:BatchSettings"
    ),
    "run-batch": Command("cli.run_batch", "answer a file of requests here, without servers"),
    "embed": Command("cli.embed", "vectors of the texts in a file, as lines of JSON or a .npy array"),
    "doctor": Command(
        "cli.doctor", "check this machine and its servers, and say what to fix", "cli.doctor.settings:DoctorSettings"
    ),
    "pull": Command("cli.pull", "fetch a model by name: org/name[@revision][:file-or-quant]"),
    "list": Command("cli.list", "the models that are kept on this machine, and which are served"),
    "show": Command("cli.show", "a model's files, size, class and context"),
    "rm": Command("cli.rm", "remove a model from this machine"),
    "gateway": Command("services.gateway", "the HTTP gateway", "services.gateway.settings:GatewaySettings"),
    "prefill": Command("services.prefill", "a prefill worker", "services.worker.settings:WorkerServiceSettings"),
    "decode": Command("services.decode", "a decode worker", "services.worker.settings:WorkerServiceSettings"),
    "worker": Command("services.worker", "a worker with both roles", "services.worker.settings:WorkerServiceSettings"),
    "pool": Command(
        "services.pool",
        "a worker for a model of embeddings, or of scores",
        "services.worker.settings:WorkerServiceSettings",
    ),
    "planner": Command(
        "services.planner",
        "moves workers between prefill and decode, by load and service levels",
        "services.planner.settings:PlannerSettings",
    ),
    "host": Command("services.host", "loads the models of a file on its machine, as gateways want them"),
    "users": Command("cli.users", "make up users and passwords for NATS and Redis", "cli.users.settings:UsersSettings"),
    "keys": Command("cli.keys", "make, list and revoke API keys"),
    "alias": Command("cli.alias", "further names of models, with shares of their requests: canaries, rollbacks"),
    "completion": Command("cli.completion", "completion for bash, zsh or fish"),
}


def settings_of(command: str) -> type[BaseModel] | None:
    """The settings class of a command."""
    module, _, name = COMMANDS[command].settings.partition(":")
    kind: type[BaseModel] | None = getattr(import_module(module), name) if module else None
    return kind


def known_names() -> frozenset[str]:
    """The names of all commands' settings. Imports them all."""
    kinds = [kind for command in COMMANDS if (kind := settings_of(command)) is not None]
    return frozenset(name for kind in kinds for name in kind.model_fields)


def remedy() -> str:
    """The command that installs missing packages. Never by the distribution's name: on PyPI it may be a stranger's."""
    if (ROOT / "Makefile").is_file():
        return f"run `make setup` in {ROOT}"
    return "`pip install '.[all]'` in Baton's folder (pipx: `pipx install --force '.[all]'`)"


def let_threads_sleep() -> None:
    """Say that torch's threads sleep between operations, unless one of OpenMP's variables says how they wait.

    By default each spins for milliseconds, half of the processor time of a small model's step. Read when torch is imported.
    """
    if not {SPINS, "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ[SPINS] = "2000"  # some microseconds


def service_environment() -> dict[str, str]:
    """The variables that all services get, besides their settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return environment | python_path(environment) | {"PYTHONUNBUFFERED": "1"}


def python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Baton's folders, then the person's own path; never the working directory, which may have a `common`."""
    paths = [str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}
