"""Earlier answers, by prefix-cache domain: a request drafts from those whose KV it could share, and from no others."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque

from decode.drafts.occurrences import COARSE, Occurrences, Tokens
from decode.drafts.settings import LookupSettings
from engine.sequence import Sequence

PIECE = 4096  # tokens that a call indexes at most; longer answers are several texts
MOST_PENDING = 256  # pieces that wait to be indexed; the oldest give way


class Answers:
    """The newest answers of each domain, `Sequence.hash_root`, and of the domains that were used last."""

    def __init__(self, settings: LookupSettings) -> None:
        self._settings = settings
        self._piece = min(PIECE, settings.answer_tokens // 4)
        self._domains: OrderedDict[bytes, _Domain] = OrderedDict()
        self._pending: deque[tuple[bytes, Tokens]] = deque(maxlen=MOST_PENDING)

    def of(self, root: bytes) -> list[Occurrences]:
        """The index of a domain's answers, if it has any."""
        domain = self._domains.get(root)
        if domain is None:
            return []
        self._domains.move_to_end(root)
        return [domain.answers]

    def add(self, sequence: Sequence) -> None:
        """Add a complete answer, with the prompt's end: it is what the answer's first tokens are found by."""
        if not self._piece or not sequence.num_generated:
            return
        start = max(0, sequence.num_prompt_tokens - COARSE)
        for place in range(start, len(sequence.token_ids), self._piece):
            piece = array("i", sequence.token_ids[place : place + self._piece])
            self._pending.append((sequence.hash_root, piece))
        self.catch_up()

    def catch_up(self) -> None:
        """Index the next piece."""
        if not self._pending:
            return
        root, piece = self._pending.popleft()
        domain = self._domains.get(root)
        if domain is None:
            domain = self._domains[root] = _Domain(self._settings)
        self._domains.move_to_end(root)
        domain.add(piece)
        if len(self._domains) > self._settings.domains:
            self._domains.popitem(last=False)


class _Domain:
    """The answers of a domain, first in, first out: between half of `answer_tokens` and all of them are kept.

    The newest half is indexed a second time, and replaces the whole when it is full.
    """

    def __init__(self, settings: LookupSettings) -> None:
        self._settings = settings
        self.answers = self._empty()
        self._newest: Occurrences | None = None

    def _empty(self) -> Occurrences:
        return Occurrences(self._settings.lengths, capacity=self._settings.answer_tokens)

    def add(self, piece: Tokens) -> None:
        if len(self.answers) + len(piece) + 1 > self._settings.answer_tokens:
            self.answers, self._newest = self._newest or self._empty(), None
        for answers in (self.answers, self._newest):
            if answers is not None:
                answers.extend(piece)
                answers.end()
        if self._newest is None and len(self.answers) > self._settings.answer_tokens // 2:
            self._newest = self._empty()
