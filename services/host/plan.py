"""The models that a host may load, and the workers of each: a file that `baton up` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from common import PREFIX

MAX_BYTES = 1 << 20


class HostedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a model: its name in logs, its service, and its settings as variables."""

    name: str
    id: str  # on the bus
    service: str  # prefill, decode, worker or pool
    variables: dict[str, str]
    log_file: str
    needs_bytes: int = 0  # host memory; 0: unknown, or elsewhere
    threads: int = 0  # on a CPU; 0: as many as there are cores

    @property
    def cards(self) -> set[str]:
        """The GPUs of all its ranks or stages, which are neighbours: none on a CPU."""
        device = self.variables.get(f"{PREFIX}DEVICE", "")
        if not device.startswith("cuda"):
            return set()
        first = int(device.partition(":")[2] or 0)
        width, depth = (
            int(self.variables.get(f"{PREFIX}{name}", 1)) for name in ("TENSOR_PARALLEL_SIZE", "PIPELINE_PARALLEL_SIZE")
        )
        return {f"cuda:{first + number}" for number in range(width * depth)}


class PulledPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Models of the hub's cache that a host may load besides, each by a set of workers that are without a model yet."""

    patterns: tuple[str, ...]  # names, with * and ?
    slots: list[list[HostedWorker]]  # at least one
    spares: list[list[HostedWorker]] = []  # likewise, of workers that come and go


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The models of one host, by the name that their workers announce."""

    models: dict[str, list[HostedWorker]]
    pulled: PulledPlan | None = None
    max_loaded: int = 0  # at once; 0: all
    drain_s: float = 30.0
    forks: bool = False  # workers are forked of a nursery
    stays_awake: str = ""  # the reason that workers can't sleep
    parks_s: float = 0.0  # sleep of an idle model; 0: only who is told to sleeps
    needs_bytes: dict[str, int] = {}  # host memory that a model takes
    spares: dict[str, list[HostedWorker]] = {}  # workers of a model that come and go with the planner's counts

    @property
    def follows_a_planner(self) -> bool:
        """True if workers come and go with a planner's counts."""
        return bool(self.spares) or (self.pulled is not None and any(self.pulled.spares))

    def everybody(self) -> Iterator[HostedWorker]:
        """All workers of the plan, and those that models of the cache may get."""
        slots = () if self.pulled is None else (*self.pulled.slots, *self.pulled.spares)
        for workers in (*self.models.values(), *self.spares.values(), *slots):
            yield from workers


def cards_of(workers: Iterable[HostedWorker]) -> set[str]:
    """The GPUs of several workers."""
    return set[str]().union(*(worker.cards for worker in workers))


def write_plan(plan: HostPlan, file: Path) -> None:
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode(plan))


def read_plan(file: Path) -> HostPlan:
    """Raises OSError, ValueError."""
    return msgspec.json.decode(file.read_bytes()[:MAX_BYTES], type=HostPlan)
