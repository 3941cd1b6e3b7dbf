"""Drafts of a head or model inside the engine (`engine.drafts`), which come with a pass's results."""

from __future__ import annotations

from engine.sequence import Sequence

LIKE_A_MATCH_OF = 8  # tokens: its acceptance until some is measured


class HeadDrafts:
    """The newest proposal for each sequence."""

    follows_results = True

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        known, drafts = sequence.proposed
        return list(drafts[:most]) if known == len(sequence.token_ids) else []

    def match_length(self, sequence: Sequence) -> int:
        return LIKE_A_MATCH_OF

    def ended(self, sequence: Sequence) -> None:
        """No-op: weights learn nothing."""
