"""Speculation in the decode batch: who drafts in a pass, and how many tokens.

A draft never changes a text (`engine.sampling.verifying`), so all that is decided here is time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine.sequence import Sequence


class Speculation(Protocol):
    """The drafts of the batch, as scheduler and role see them."""

    @property
    def ahead(self) -> int:
        """Positions behind a pass's that its sequences need for the next drafts."""
        ...

    def awaits(self, sequence: Sequence, *, rows: int) -> bool:
        """True if a draft will probably follow the token in flight: the sequence sits out until that is known.

        `rows`: of the whole batch without drafts.
        """
        ...

    def stops_the_others(self, num_drafting: int, num_running: int) -> bool:
        """True if no pass should be planned before so many sequences know what was accepted, though others could go on."""
        ...

    def drafts(
        self, wanted: Mapping[Sequence, int], *, rows: int, most_rows: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """Drafts for a pass with `rows` rows besides, `most_rows` in all; none is empty. `wanted`: the most tokens of each."""
        ...

    def verified(self, sequence: Sequence, *, drafted: int, accepted: int) -> None:
        """Learn from a draft's end."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Take note that the answer is complete."""
        ...


class NoSpeculation:
    """Speculation switched off."""

    ahead = 0

    def awaits(self, sequence: Sequence, *, rows: int) -> bool:
        return False

    def stops_the_others(self, num_drafting: int, num_running: int) -> bool:
        return False

    def drafts(
        self, wanted: Mapping[Sequence, int], *, rows: int, most_rows: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        return {}

    def verified(self, sequence: Sequence, *, drafted: int, accepted: int) -> None:
        """No-op: there are no drafts."""

    def ended(self, sequence: Sequence) -> None:
        """No-op: nothing is remembered."""


NO_SPECULATION = NoSpeculation()
