"""The seam between the decode role and its drafters."""

from __future__ import annotations

from typing import Protocol

from engine.sequence import Sequence


class Drafter(Protocol):
    """A source of drafts. It is called on the event loop, for each drafting sequence, between passes."""

    @property
    def follows_results(self) -> bool:
        """True if its drafts come with a pass's results, so that none is there while a token is in flight."""
        ...

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """At most `most` tokens, and `most` is at least 1, that may follow `sequence.token_ids`; [] without a good guess."""

    def match_length(self, sequence: Sequence) -> int:
        """The number of known tokens that the last draft was derived from: the longer, the likelier its tokens."""

    def ended(self, sequence: Sequence) -> None:
        """Take note that the answer is complete: later requests may draft from it."""
