"""The choice among groups of disagreeing decode workers: the largest one; of equally large ones the oldest.

A group keeps its turn while its workers restart. A gateway that starts hears all groups within a moment: of those the one that an
earlier gateway wrote down comes first, else the one with the oldest worker.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from common.messages import WorkerState

REMEMBERED_S = 600.0  # memory of a group without workers, and of an earlier gateway's marks
# Groups heard within some heartbeats of the first one were all here before.
BEFORE_S = 5.0
MAX_SUBJECTS = 1_000


@dataclass(slots=True)
class _Group:
    turn: tuple[bool, float, int, str]  # sorts older groups first
    seen_at: float


class Incumbents:
    """Tracks groups by subject of disagreement, such as `weights of demo`. `written`: a group's mark by subject, see `marks`."""

    def __init__(
        self, *, written: Mapping[str, str] = MappingProxyType({}), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._written = written
        self._clock = clock
        self._began_at: float | None = None  # when the first group was heard
        self._groups: dict[str, dict[str, _Group]] = {}

    def choose(self, subject: str, found: Mapping[str, Sequence[WorkerState]]) -> str:
        """The group to use, of at least one."""
        now = self._clock()
        began_at = self._began_at = now if self._began_at is None else self._began_at
        if len(self._groups) >= MAX_SUBJECTS and subject not in self._groups:
            self._groups.clear()
        known = self._groups.setdefault(subject, {})
        for name, workers in found.items():
            group = known.get(name)
            if group is None:
                known[name] = group = _Group(self._turn(subject, name, workers, now, since_s=now - began_at), now)
            group.seen_at = now
        for name in [name for name, group in known.items() if now - group.seen_at > REMEMBERED_S]:
            del known[name]
        return min(found, key=lambda name: (-len(found[name]), known[name].turn))

    @property
    def marks(self) -> dict[str, str]:
        """The mark of the oldest group by subject, for gateways that start later."""
        first = {subject: min(known, key=lambda name: known[name].turn) for subject, known in self._groups.items()}
        return {subject: mark(name) for subject, name in first.items()}

    def _turn(
        self, subject: str, name: str, workers: Sequence[WorkerState], now: float, *, since_s: float
    ) -> tuple[bool, float, int, str]:
        is_written = self._written.get(subject) == mark(name) and since_s < REMEMBERED_S
        was_before = since_s < BEFORE_S
        return not is_written, 0.0 if was_before else now, min(state.incarnation for state in workers), name


def mark(name: str) -> str:
    """A short hash of a group's name."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
