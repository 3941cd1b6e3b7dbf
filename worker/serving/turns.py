"""Turns of requests that wait for blocks, and the reasons for which prompts wait.

Against starvation: after 16 overtakings a waiting request gets a reservation. Whoever fits is admitted past those who don't:
their blocks would be idle. But small ones that keep coming would never let a large one in. So each that waits counts who came
later and was admitted first. After `MOST_PASSED` of them it is its turn: what becomes free is kept for it, and who came later
is admitted only beside that. Who runs may grow, and gives its blocks back as it ends. If it is the turn of several, what is
kept is for all, and they go in the order in which they began to wait.

Nobody who waits holds blocks of this pool, and nobody who holds some waits for one who waits: see docs/design/deadlock.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum

MOST_PASSED = 16


class Wait(StrEnum):
    """The reason why a claimed prompt isn't begun by the next pass."""

    ROOM = "room"  # too few free KV blocks
    LOAD = "load"  # KV of its prefix is on the way
    GRAMMAR = "grammar"  # it is being built
    PLACE = "place"  # the batch is full
    PROMPTS = "prompts"  # others go first


@dataclass(slots=True)
class Waits:
    """Milliseconds that a prompt waited, by reason. A plan notes the reason for which it goes on to wait."""

    reason: Wait = Wait.PROMPTS
    ms: dict[str, float] = field(default_factory=dict)
    _noted_at: float | None = None

    def note(self, reason: Wait, *, since: float, now: float) -> None:
        """Count the time since the last note, or `since` if this is the first one."""
        passed = now - (since if self._noted_at is None else self._noted_at)
        self.ms[self.reason] = self.ms.get(self.reason, 0.0) + 1000 * passed
        self.reason, self._noted_at = reason, now


@dataclass(slots=True)
class _Waiting:
    blocks: int  # free blocks that it needs
    passed: int  # later requests admitted before it
    until: float  # expires unless renewed


class Turns:
    """Requests that wait for blocks of one pool, in order of arrival."""

    def __init__(self, *, changed: Callable[[], object] = lambda: None) -> None:
        """`changed()`: called when reserved blocks may become available to others."""
        self._changed = changed
        self._waiting: dict[Hashable, _Waiting] = {}
        self._due: list[Hashable] = []

    @property
    def due(self) -> list[Hashable]:
        """Waiting requests that are due, in order."""
        return list(self._due)

    def __contains__(self, who: Hashable) -> bool:
        return who in self._waiting

    @property
    def are_open(self) -> bool:
        """True if anybody waits."""
        return bool(self._waiting)

    def kept_from(self, who: Hashable) -> int:
        """Blocks that the admission of `who` must leave free for requests that are due before it."""
        kept = 0
        for other in self._due:
            if other == who:
                break
            kept += self._waiting[other].blocks
        return kept

    def waits(self, who: Hashable, *, blocks: int, passed: int = 0, until: float = math.inf) -> None:
        """Register a request that found no room and needs `blocks` free ones. `passed`: overtakings in earlier waits."""
        known = self._waiting.get(who)
        if known is not None:
            known.blocks, known.until = blocks, until
            return
        self._waiting[who] = _Waiting(blocks, passed, until)
        self._see_whose_turn_it_is()

    def still_waits(self, who: Hashable, *, until: float) -> None:
        """Renew a request's wait, whatever it finds now. Unknown ones are ignored."""
        known = self._waiting.get(who)
        if known is not None:
            known.until = until

    def admitted(self, who: Hashable) -> int:
        """Record an admission: all earlier waiters were overtaken. Returns how often it was itself."""
        for other, waiting in self._waiting.items():
            if other == who:
                break
            waiting.passed += 1
        known = self._waiting.pop(who, None)
        self._see_whose_turn_it_is()
        return known.passed if known is not None else 0

    def leaves(self, who: Hashable) -> None:
        """Remove a request that waits no longer. Unknown ones are ignored."""
        if self._waiting.pop(who, None) is not None:
            self._see_whose_turn_it_is()

    def look_after(self, now: float) -> None:
        """Forget requests whose wait was not renewed."""
        for who in [who for who, waiting in self._waiting.items() if waiting.until < now]:
            self.leaves(who)

    def _see_whose_turn_it_is(self) -> None:
        before = self._due
        self._due = [who for who, waiting in self._waiting.items() if waiting.passed >= MOST_PASSED]
        if any(who not in self._waiting for who in before):
            self._changed()
