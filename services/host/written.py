"""The file of `baton host`: the workers that it may start, written by people in TOML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from common import PREFIX
from common.settings import ConfigError
from common.subjects import check_id
from gateway.answers.ask import lasting_s
from services.host.needs import bytes_of, stays_awake
from services.host.plan import HostedWorker, HostPlan, PulledPlan
from services.host.suits import HOSTED, POOL, refused, settings_of
from services.rank.cores import physical_cores
from services.worker.settings import WorkerServiceSettings

MAX_BYTES = 1 << 20
MAX_WORKERS = 64
Options = dict[str, str | int | float | bool]


class WrittenWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker, or several alike."""

    model: str = ""  # as gateways call it; of pulled models none
    service: str = "worker"
    count: int = 1  # started with the model
    most: int = 0  # the bound of the planner's counts; 0: count
    options: Options = {}  # settings of the service, by their names


class WrittenPulled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Models of the hub's cache, as they come, and the workers of each one that is loaded."""

    models: list[str]  # patterns of names, as org/*
    worker: list[WrittenWorker]


class WrittenPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    name: str  # on the bus; unlike other hosts'
    worker: list[WrittenWorker] = []
    pulled: WrittenPulled | None = None
    options: Options = {}  # all workers have these settings
    max_loaded: int = 0
    sleeps: str = ""  # as 1h: how long an idle model sleeps before it is unloaded
    drain_s: float = 30.0
    logs: str = "logs"


def read_written(file: Path) -> tuple[str, HostPlan]:
    """The host's name and plan; the folder of logs is made. Raises ConfigError, naming field and remedy, or OSError."""
    written, sleeps_s = _checked_plan(file)
    folder = (file.parent / written.logs).resolve()
    numbered = Numbered(file, written, folder)
    models: dict[str, list[HostedWorker]] = {}
    spares: dict[str, list[HostedWorker]] = {}
    for entry in written.worker:
        workers, more = numbered.of([entry])
        models.setdefault(entry.model, []).extend(workers)
        if more:
            spares.setdefault(entry.model, []).extend(more)
    _check_room(file, models, spares)
    pulled = _pulled(file, written, numbered)
    _check_models(file, [worker for workers in (*models.values(), *spares.values()) for worker in workers])
    folder.mkdir(parents=True, exist_ok=True)
    settings = numbered.settings
    plan = HostPlan(
        models=models,
        pulled=pulled,
        max_loaded=written.max_loaded,
        drain_s=written.drain_s,
        forks=all(one.processor == "cpu" for one in settings),
        stays_awake=next(filter(None, map(stays_awake, settings)), ""),
        parks_s=sleeps_s,
        needs_bytes={model: sum(one.needs_bytes for one in workers) for model, workers in models.items()},
        spares=spares,
    )
    return written.name, plan


class Numbered:
    """The workers of a file, numbered on from entry to entry, with the settings of all so far."""

    def __init__(self, file: Path, written: WrittenPlan, folder: Path) -> None:
        self._file, self._written, self._folder = file, written, folder
        self.settings: list[WorkerServiceSettings] = []

    def of(self, entries: Sequence[WrittenWorker]) -> tuple[list[HostedWorker], list[HostedWorker]]:
        """The workers of entries: those that start with a model, and its spare ones."""
        own: list[HostedWorker] = []
        spare: list[HostedWorker] = []
        for entry in entries:
            for at in range(max(entry.count, entry.most)):
                worker = _worker(self._written, entry, len(self.settings), self._folder)
                self.settings.append(_checked(self._file, self._written, entry, worker))
                (own if at < entry.count else spare).append(_sized(worker, self.settings[-1]))
        return own, spare


def _pulled(file: Path, written: WrittenPlan, numbered: Numbered) -> PulledPlan | None:
    if written.pulled is None:
        return None
    slots = [numbered.of(written.pulled.worker) for _ in range(written.max_loaded)]
    _check_slot(file, *slots[0])
    return PulledPlan(
        patterns=tuple(written.pulled.models), slots=[own for own, _ in slots], spares=[spare for _, spare in slots]
    )


def _checked_plan(file: Path) -> tuple[WrittenPlan, float]:
    """The file, and how long idle models sleep. Raises as `read_written`."""
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{file}: has {size} bytes, {MAX_BYTES} at most: name fewer workers, or use count")
        written = msgspec.toml.decode(file.read_bytes(), type=WrittenPlan)
        check_id(written.name)
        sleeps_s = lasting_s(written.sleeps) if written.sleeps else 0.0
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if not written.worker and written.pulled is None:
        raise ConfigError(f"{file}: worker: name at least one, as [[worker]] with model and options")
    if written.max_loaded < 0 or written.drain_s < 0:
        raise ConfigError(f"{file}: max_loaded and drain_s: give 0 or more")
    for entry in written.worker:
        _check_entry(file, entry)
        if not entry.model:
            raise ConfigError(f"{file}: worker: a {entry.service} has no model: give the name that gateways call it by")
    if written.pulled is not None:
        _check_pulled(file, written, written.pulled)
    return written, sleeps_s


def _check_models(file: Path, workers: list[HostedWorker]) -> None:
    for name, why in refused(workers).items():
        raise ConfigError(f"{file}: {name}: {why}")


def _check_entry(file: Path, entry: WrittenWorker) -> None:
    if entry.service not in HOSTED:
        raise ConfigError(f"{file}: service {entry.service!r}: is one of {', '.join(HOSTED)}")
    model = entry.model or "pulled"
    if not (0 if entry.most else 1) <= entry.count <= MAX_WORKERS:
        raise ConfigError(f"{file}: count {entry.count} of {model}: is 1 to {MAX_WORKERS}, or 0 beside most")
    if entry.most and not entry.count <= entry.most <= MAX_WORKERS:
        raise ConfigError(
            f"{file}: most {entry.most} of {model}: is count, here {entry.count}, to {MAX_WORKERS}; leave it out for count"
        )


def _check_room(
    file: Path, models: Mapping[str, Sequence[HostedWorker]], spares: Mapping[str, Sequence[HostedWorker]]
) -> None:
    """Refuse bounds that this machine never has room for, and models that nothing starts with."""
    memory, cores = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), physical_cores()
    for model, more in spares.items():
        if not models[model]:
            raise ConfigError(f"{file}: count of {model}: give one of its entries a count of 1 or more, to start with")
        workers = [*models[model], *more]
        if (needed := sum(one.needs_bytes for one in workers)) > memory:
            gib = f"{needed / (1 << 30):.1f} GiB, and this machine has {memory / (1 << 30):.1f}"
            raise ConfigError(
                f"{file}: most of {model}: its {len(workers)} workers need {gib}: give a smaller most or kv_memory_mb"
            )
        if (threads := sum(one.threads for one in workers)) > cores:
            raise ConfigError(
                f"{file}: most of {model}: its {len(workers)} workers have {threads} threads, and this machine has "
                f"{cores} cores: give a smaller most or threads"
            )


def _check_slot(file: Path, workers: Sequence[HostedWorker], more: Sequence[HostedWorker]) -> None:
    """Refuse workers of a pulled model that nothing starts with, or that this machine never has cores for."""
    cores = physical_cores()
    for pools in (False, True):
        first, spare = ([one for one in each if (one.service == POOL) == pools] for each in (workers, more))
        if spare and not first:
            kind = POOL if pools else "prefill, decode or worker"
            raise ConfigError(
                f"{file}: pulled.worker: give one with service {kind} a count of 1 or more, to start with"
            )
        if spare and (threads := sum(one.threads for one in (*first, *spare))) > cores:
            raise ConfigError(
                f"{file}: most of pulled.worker: the {len(first) + len(spare)} workers of a model have {threads} threads, "
                f"and this machine has {cores} cores: give a smaller most or threads"
            )


def _check_pulled(file: Path, written: WrittenPlan, pulled: WrittenPulled) -> None:
    if not pulled.models or not pulled.worker:
        raise ConfigError(f'{file}: pulled: give models, as ["org/*"], and at least one [[pulled.worker]]')
    if not 0 < written.max_loaded <= MAX_WORKERS:
        raise ConfigError(f"{file}: max_loaded: with pulled models 1 to {MAX_WORKERS}, which are loaded at once")
    for entry in pulled.worker:
        _check_entry(file, entry)
    named = [entry.model or str(entry.options.get("model", "")) for entry in pulled.worker]
    if any(named):
        raise ConfigError(
            f"{file}: pulled.worker: leave model {next(filter(None, named))!r} out: it is each one of models"
        )


def _worker(written: WrittenPlan, entry: WrittenWorker, number: int, folder: Path) -> HostedWorker:
    name = f"{entry.service}-{number}"
    own: Options = {"served_model_name": entry.model, "worker_id": f"{written.name}-{name}", "drain_s": written.drain_s}
    options: Options = {**written.options, **entry.options, **own}
    variables = {f"{PREFIX}{key.upper()}": _text(value) for key, value in options.items()}
    return HostedWorker(
        name=name,
        id=f"{written.name}-{name}",
        service=entry.service,
        variables=variables,
        log_file=str(folder / f"{name}.log"),
    )


def _checked(file: Path, written: WrittenPlan, entry: WrittenWorker, worker: HostedWorker) -> WorkerServiceSettings:
    """The worker's settings. Raises ConfigError if one is wrong, or unknown."""
    known = WorkerServiceSettings.model_fields
    if unknown := [name for name in written.options | entry.options if name not in known]:
        raise ConfigError(f"{file}: options of {entry.model}: a {entry.service} has no setting {unknown[0]!r}")
    try:
        return settings_of(worker)
    except ConfigError as error:
        raise ConfigError(f"{file}: {worker.name} of {entry.model}: {error}") from None


def _sized(worker: HostedWorker, settings: WorkerServiceSettings) -> HostedWorker:
    """A worker with what it takes of this machine."""
    threads = settings.threads * settings.processes if settings.processor == "cpu" else 0
    return msgspec.structs.replace(worker, needs_bytes=bytes_of(settings, settings.model), threads=threads)


def _text(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
