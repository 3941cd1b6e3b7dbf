"""Trials of requests suspected of killing a worker: one at a time, each named beforehand.

If this worker dies as well, the gateways know the culprit: no other request is blamed, and no third worker dies.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from weakref import WeakKeyDictionary

from msgspec import UNSET, UnsetType

from engine.engine import Chunk
from engine.sequence import Sequence


class Trials:
    """The order of trials: at most one suspect is in flight. Roles hold the others back; the pipeline names the one."""

    def __init__(self) -> None:
        self._on_trial: Sequence | None = None
        # (gateway, context)
        self._watched: WeakKeyDictionary[Sequence, tuple[str, str | UnsetType]] = WeakKeyDictionary()

    def watch(self, sequence: Sequence, gateway: str, context: str | UnsetType = UNSET) -> None:
        """Tell `gateway` when the sequence is tried, if it is a suspect. `context`: the job's trace."""
        if sequence.is_suspect:
            self._watched[sequence] = gateway, context

    def context(self, suspect: Sequence) -> str | UnsetType:
        """The job's trace, from `watch`."""
        return self._watched.get(suspect, ("", UNSET))[1]

    @property
    def is_idle(self) -> bool:
        """True if there are no suspects, the usual case."""
        return not self._watched

    @property
    def gateways(self) -> set[str]:
        """Gateways with suspects here. Each must know which one is tried, or it would blame its own."""
        return {gateway for sequence, (gateway, _) in self._watched.items() if sequence.is_suspect}

    def held_back(self, sequences: ListOf[Sequence]) -> set[Sequence]:
        """Suspects that must not join the next pass: all but the first, or all while one is in flight."""
        suspects = [] if self.is_idle else [sequence for sequence in sequences if sequence.is_suspect]
        return set(suspects if self._on_trial is not None else suspects[1:])

    def planned(self, chunks: ListOf[Chunk]) -> None:
        for chunk in chunks:
            if chunk.sequence.is_suspect:
                self._on_trial = chunk.sequence

    def on_trial(self, shares: ListOf[ListOf[Chunk]]) -> Sequence | None:
        """The suspect in a pass of these chunks, to be named before launch."""
        found = (chunk.sequence for share in shares for chunk in share if chunk.sequence is self._on_trial)
        return next(found, None)

    def landed(self, chunks: ListOf[Chunk]) -> None:
        """Record the end of a pass: the device survived it."""
        if self.is_idle and self._on_trial is None:
            return
        if any(chunk.sequence is self._on_trial for chunk in chunks):
            self._on_trial = None
        for sequence in [sequence for sequence in self._watched if not sequence.is_suspect]:
            del self._watched[sequence]
