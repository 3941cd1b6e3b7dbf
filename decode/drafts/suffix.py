"""Suffix and n-gram lookup: no weights, the host only (arXiv 2411.04975)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from decode.drafts.continuation import likeliest
from decode.drafts.occurrences import NOTHING, Found, Occurrences
from decode.drafts.settings import LookupSettings
from engine.sequence import Sequence

SLICE = 4096  # tokens that a call indexes at most
MOST_ANSWER_SLOTS = 32_768  # an index is made for this many generated tokens at most


class Lookup:
    """Drafts from a sequence's own prompt and answer, as far as they are indexed."""

    def __init__(self, settings: LookupSettings) -> None:
        self._settings = settings
        self._own: WeakKeyDictionary[Sequence, _Own] = WeakKeyDictionary()

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        own = self._own.get(sequence)
        if own is None:
            own = self._own[sequence] = _Own(sequence, self._settings)
        own.catch_up(sequence)
        if most < 1:
            return []
        own.found = found = own.occurrences.longest(own.occurrences.suffix(sequence.token_ids))
        length = int(min(most, found.length * self._settings.factor))
        if length < 1:
            return []
        text = own.occurrences.text
        rows = [text[place : place + length] for place in found.places]
        return likeliest(rows, min_probability=self._settings.min_probability)

    def match_length(self, sequence: Sequence) -> int:
        own = self._own.get(sequence)
        return own.found.length if own is not None else 0

    def ended(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)


class _Own:
    """The index of a sequence's own tokens."""

    def __init__(self, sequence: Sequence, settings: LookupSettings) -> None:
        answer = min(sequence.sampling.max_tokens, MOST_ANSWER_SLOTS)
        self.occurrences = Occurrences(settings.lengths, capacity=sequence.num_prompt_tokens + answer)
        self.found: Found = NOTHING

    def catch_up(self, sequence: Sequence) -> None:
        """Index the next tokens: a bounded number, for the event loop waits."""
        known = len(self.occurrences)
        if known < len(sequence.token_ids):
            self.occurrences.extend(sequence.token_ids[known : known + SLICE])
