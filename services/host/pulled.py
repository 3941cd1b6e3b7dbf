"""Models of the hub's cache that a host may load besides those of its plan: found by name, checked, each given a set of workers.

The cache is read again when its files change. A set of workers is a slot: settings without a model, and names on the bus,
of those that generate and of one that pools.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common import PREFIX
from common.settings import ConfigError
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
    needs_bytes: int  # host memory of its workers; 0: unknown, or elsewhere
    pools: bool = False  # it makes vectors or scores
    spare_bytes: tuple[int, ...] = ()  # host memory of each spare worker


class PulledModels:
    """The cache's models, and the slots. `look` runs on a thread, everything else on the event loop."""

    def __init__(self, plan: PulledPlan) -> None:
        self._plan = plan
        self._free = list(range(len(plan.slots)))[::-1]
        self._taken: dict[str, int] = {}  # by model
        self._uses = Counter[str]()  # by model, of its slot
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
                found[one.name] = self._checked(one.name, one.model)
            except (ConfigError, GgufError, OSError, ValueError) as error:
                log.warning("host.model_refused", extra={"model": one.name, "why": str(error)})
        return found

    def _checked(self, name: str, folder: Path) -> Found:
        """A model with what it takes. Raises ConfigError if the workers don't suit it."""
        pools = is_pooled(folder)
        workers, spares = (
            with_model(slot, name, folder, pools=pools) for slot in (self._plan.slots[0], self._spare(0))
        )
        if not workers:
            raise ConfigError(LACKS[pools])
        if folder not in self._judged:  # a snapshot's files stay as they are
            self._judged[folder] = next(iter(refused([*workers, *spares], reads_all=False).values()), "")
        if self._judged[folder]:
            raise ConfigError(self._judged[folder])
        needs, more = ([bytes_of(settings_of(worker), folder) for worker in each] for each in (workers, spares))
        return Found(folder, sum(needs), pools, tuple(more))

    def _spare(self, slot: int) -> list[HostedWorker]:
        return self._plan.spares[slot] if slot < len(self._plan.spares) else []

    def take(self, name: str, found: Found) -> list[HostedWorker]:
        """A model's workers, whose slot is its own until as many `give_back`; none while all slots are taken."""
        workers = self.next_workers(name, found)
        if workers:
            self._uses[name] += 1
            if name not in self._taken:
                self._taken[name] = self._free.pop()
        return workers

    def give_back(self, name: str) -> None:
        """Its workers have ended, or a spare one has."""
        self._uses[name] -= 1
        if self._uses[name] <= 0:
            del self._uses[name]
            if name in self._taken:
                self._free.append(self._taken.pop(name))

    def has_a_slot(self, name: str) -> bool:
        return name in self._taken

    def next_workers(self, name: str, found: Found) -> list[HostedWorker]:
        """The workers that `take` would return."""
        slot = self._slot_of(name)
        return [] if slot is None else with_model(self._plan.slots[slot], name, found.folder, pools=found.pools)

    def spares(self, name: str, found: Found) -> list[HostedWorker]:
        """More workers of the slot that a model has or would get. Who starts one has to `take` the slot as well."""
        slot = self._slot_of(name)
        spare = [] if slot is None else with_model(self._spare(slot), name, found.folder, pools=found.pools)
        sizes = zip(spare, found.spare_bytes, strict=True) if spare else ()
        return [msgspec.structs.replace(worker, needs_bytes=size) for worker, size in sizes]

    def _slot_of(self, name: str) -> int | None:
        return self._taken.get(name, self._free[-1] if self._free else None)


def with_model(slot: Sequence[HostedWorker], name: str, folder: Path, *, pools: bool) -> list[HostedWorker]:
    """The workers of a slot that serve such a model: those that pool, or the others."""
    own = {f"{PREFIX}MODEL": str(folder), f"{PREFIX}SERVED_MODEL_NAME": name}
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
