"""Models that a host's workers can't serve, found before any is started, in the words of the workers themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelfiles.files import is_model
from modelfiles.pooling import is_pooled
from services.host.plan import HostedWorker
from services.runtime.checks.model import check_model
from services.runtime.loading import load_settings
from services.runtime.models.named import missing
from services.runtime.permissions import WORKERS
from services.worker.refusals import refusals
from services.worker.settings import WorkerServiceSettings

POOL = "pool"
HOSTED = (*WORKERS, POOL)  # services that a host may start
MAKES_NO_TEXT = "it makes vectors or scores, and generates nothing: its worker is a pool"
MAKES_TEXT = "it generates text: its workers are prefill, decode, or worker"


def refused(workers: Sequence[HostedWorker], *, reads_all: bool = True) -> dict[str, str]:
    """The reasons why workers can't serve their models, by the workers' names. A model that isn't whole here is not judged.

    `reads_all`: read each model as its worker does, which takes seconds; else those of several ranks or stages alone.
    """
    found = dict[str, str]()
    read = list[HostedWorker]()
    for worker in workers:
        settings = settings_of(worker)
        if settings.fake or not is_model(settings.model) or missing(settings.model):
            continue
        if why := unsuitable(worker.service, settings.model, settings.model_impl):
            found[worker.name] = f"--model {settings.model}: {why}"
        elif reads_all or settings.processes > 1:
            read.append(worker)
    said = refusals([worker.variables for worker in read])
    return found | {worker.name: why for worker, why in zip(read, said, strict=True) if why}


def unsuitable(service: str, model: Path, impl: str) -> str:
    """The reason why a model isn't served by such a worker; "" if it is."""
    if is_pooled(model) != (service == POOL):
        return MAKES_TEXT if service == POOL else MAKES_NO_TEXT
    return next((finding.said for finding in check_model(model, impl=impl) if finding.level == "fail"), "")


def settings_of(worker: HostedWorker) -> WorkerServiceSettings:
    """A worker's settings. Raises ConfigError."""
    settings = load_settings(
        WorkerServiceSettings, command=worker.service, arguments=[], environment=dict(worker.variables)
    )
    settings.check_alone() if worker.service == POOL else settings.check_ranks()
    return settings
