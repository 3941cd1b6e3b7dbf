"""Suffix and n-gram lookup: no weights, the host only (arXiv 2411.04975)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from decode.drafts.answers import Answers
from decode.drafts.continuation import likeliest
from decode.drafts.occurrences import Tokens
from decode.drafts.own import OwnTokens
from decode.drafts.settings import LookupSettings
from engine.sequence import Sequence


class Lookup:
    """Drafts from a sequence's own tokens and prediction, and from earlier answers of its prefix-cache domain.

    A call indexes a slice at most; tokens behind it are found later.
    """

    follows_results = False

    def __init__(self, settings: LookupSettings) -> None:
        self._settings = settings
        self._own: WeakKeyDictionary[Sequence, OwnTokens] = WeakKeyDictionary()
        self._answers = Answers(settings)

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        own = self._own.get(sequence)
        if own is None:
            own = self._own[sequence] = OwnTokens(sequence, self._settings.lengths)
        own.catch_up(sequence)
        self._answers.catch_up()
        foretold = own.foretold(sequence)
        if foretold is not None:
            own.matched = self._settings.lengths.most
            return foretold[: self._length(own, most)]
        rows = self._continuations(own, sequence, most)
        return likeliest(rows, min_probability=self._settings.min_probability) if rows else []

    def _continuations(self, own: OwnTokens, sequence: Sequence, most: int) -> list[Tokens]:
        """Continuations of the longest match: first the sequence's own tokens, newest first."""
        sources = [own.occurrences, *self._answers.of(sequence.hash_root)]
        suffix = own.occurrences.suffix(sequence.token_ids)
        found = [source.longest(suffix) for source in sources]
        own.matched = max(one.length for one in found)
        length = self._length(own, most)
        return [
            source.text[place : place + length]
            for source, one in zip(sources, found, strict=True)
            if length and one.length == own.matched
            for place in one.places
        ]

    def _length(self, own: OwnTokens, most: int) -> int:
        return int(min(most, own.matched * self._settings.factor))

    def match_length(self, sequence: Sequence) -> int:
        own = self._own.get(sequence)
        return own.matched if own is not None else 0

    def ended(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)
        self._answers.add(sequence)
