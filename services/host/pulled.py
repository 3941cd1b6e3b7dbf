"""Models of the hub's cache that a host may load besides those of its plan: found by name, checked, each given a set of workers.

The cache is read again when its files change. A set of workers is a slot: settings without a model, and names on the bus,
of those that generate and of one that pools.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.settings import PREFIX, ConfigError
from modelfiles.gguf import GgufError
from modelfiles.pooling import is_pooled
from services.host.needs import bytes_of
from services.host.plan import HostedWorker, PulledPlan
from services.host.suits import POOL, refused, settings_of
from services.runtime import hub
from services.runtime.models.kept import Kept, kept_models

log = logging.getLogger("baton.host")

MAX_OFFERED = 64
LACKS = {
    True: "it makes vectors or scores, and pulled.worker has no service = 'pool' for such",
    False: "it generates text, and pulled.worker has none of prefill, decode and worker for such",
}


@dataclass(frozen=True, slots=True)
class Found:
    """A model of the cache that may be loaded."""

    folder: Path  # or GGUF file
    needs_bytes: int  # host memory; 0: unknown, or elsewhere


class PulledModels:
    """The cache's models, and the slots. `look` runs on a thread, everything else on the event loop."""

    def __init__(self, plan: PulledPlan) -> None:
        self._plan = plan
        self._free = list(range(len(plan.slots)))[::-1]
        self._taken: dict[str, int] = {}  # by model
        self._seen: tuple[str, ...] | None = None
        self._found: dict[str, Found] = {}
        self._judged: dict[Path, str] = {}  # the reason that its workers can't serve it, or ""

    def look(self) -> dict[str, Found]:
        """The models that may be loaded now, by name: the same object until files change. Raises OSError."""
        seen = _files()
        if seen != self._seen:
            self._seen, self._found = seen, self._allowed()
        return self._found

    def _allowed(self) -> dict[str, Found]:
        found = dict[str, Found]()
        for one in sorted(_named_models(), key=lambda one: one.name):
            if not any(fnmatch.fnmatchcase(one.name, pattern) for pattern in self._plan.patterns):
                continue
            if len(found) >= MAX_OFFERED:
                log.warning("host.too_many_models", extra={"most": MAX_OFFERED, "left_out": one.name})
                break
            try:
                found[one.name] = Found(one.model, self._needs(one.name, one.model))
            except (ConfigError, GgufError, OSError, ValueError) as error:
                log.warning("host.model_refused", extra={"model": one.name, "why": str(error)})
        return found

    def _needs(self, name: str, folder: Path) -> int:
        """Bytes of all its workers. Raises ConfigError if these don't suit it."""
        workers = with_model(self._plan.slots[0], name, folder)
        if not workers:
            raise ConfigError(LACKS[is_pooled(folder)])
        if folder not in self._judged:  # a snapshot's files stay as they are
            self._judged[folder] = next(iter(refused(workers).values()), "")
        if self._judged[folder]:
            raise ConfigError(self._judged[folder])
        return sum(bytes_of(settings_of(worker), folder) for worker in workers)

    def take(self, name: str, found: Found) -> list[HostedWorker]:
        """A model's workers, which are its own until `give_back`; none while all slots are taken."""
        if name not in self._taken:
            if not self._free:
                return []
            self._taken[name] = self._free.pop()
        return with_model(self._plan.slots[self._taken[name]], name, found.folder)

    def give_back(self, name: str) -> None:
        """Its workers have ended."""
        if name in self._taken:
            self._free.append(self._taken.pop(name))


def with_model(slot: Sequence[HostedWorker], name: str, folder: Path) -> list[HostedWorker]:
    """The workers of a slot that serve such a model: those that pool, or the others."""
    own = {f"{PREFIX}MODEL": str(folder), f"{PREFIX}SERVED_MODEL_NAME": name}
    pools = is_pooled(folder)
    return [
        msgspec.structs.replace(worker, variables=worker.variables | own)
        for worker in slot
        if (worker.service == POOL) == pools
    ]


def _named_models() -> list[Kept]:
    """The whole models of each repository's main branch: a commit's own name may be another one tomorrow."""
    return [one for one in kept_models() if one.is_whole and _is_of_main(one.name)]


def _is_of_main(name: str) -> bool:
    named = hub.parsed(name)
    return named is not None and named.revision == hub.MAIN


def _files() -> tuple[str, ...]:
    """All that names models and their files in the cache. A file of weights has its name there once it is whole."""
    repositories = sorted(hub.cache().glob("models--*"))
    names = [str(path) for repo in repositories for path in sorted((repo / "snapshots").rglob("*"))]
    refs = [ref for repo in repositories for ref in sorted((repo / "refs").rglob("*")) if ref.is_file()]
    return (*names, *(f"{ref} {ref.read_text(encoding='utf-8')}" for ref in refs))
