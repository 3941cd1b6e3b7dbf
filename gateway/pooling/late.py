"""Queries and documents of ColBERT: a marker behind the first token, and padding up to a query's length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelfiles.late import Late
from modelfiles.pooling import SIDES


@dataclass(frozen=True, slots=True)
class Marked:
    """A side of a comparison, before it has its tokens."""

    late: Late
    side: str  # one of `SIDES`

    @property
    def is_query(self) -> bool:
        return self.side == SIDES[0]

    def room(self, longest: int, *, is_cut: bool) -> int:
        """Tokens of a text without its marker: what is cut is cut to the side's own length."""
        own = self.late.query_length if self.is_query else self.late.document_length
        return (min(own, longest) if is_cut else longest) - 1

    def ids(self, text: Sequence[int], longest: int) -> list[int]:
        """The tokens of a side. A query is padded as far as the model takes it."""
        late = self.late
        found = [*text[:1], late.query if self.is_query else late.document, *text[1:]]
        if self.is_query and late.padding is not None:
            found += [late.padding] * (min(late.query_length, longest) - len(found))
        return found
