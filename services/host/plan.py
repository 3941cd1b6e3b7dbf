"""The models that a host may load, and the workers of each: a file that `baton up` writes. It imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

import msgspec

MAX_BYTES = 1 << 20


class HostedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a model: its name in logs, its service, and its settings as variables."""

    name: str
    id: str  # on the bus
    service: str  # prefill, decode or worker
    variables: dict[str, str]
    log_file: str


class PulledPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Models of the hub's cache that a host may load besides, each by a set of workers that are without a model yet."""

    patterns: tuple[str, ...]  # names, with * and ?
    slots: list[list[HostedWorker]]  # at least one


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The models of one host, by the name that their workers announce."""

    models: dict[str, list[HostedWorker]]
    pulled: PulledPlan | None = None
    max_loaded: int = 0  # at once; 0: all
    drain_s: float = 30.0
    forks: bool = False  # workers are forked of a nursery
    can_park: bool = False  # workers can sleep
    parks_s: float = 0.0  # sleep of an idle model; 0: only who is told to sleeps
    needs_bytes: dict[str, int] = {}  # host memory that a model takes


def write_plan(plan: HostPlan, file: Path) -> None:
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode(plan))


def read_plan(file: Path) -> HostPlan:
    """Raises OSError, ValueError."""
    return msgspec.json.decode(file.read_bytes()[:MAX_BYTES], type=HostPlan)
