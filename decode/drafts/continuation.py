"""The draft that follows from several occurrences of a suffix."""

from __future__ import annotations

from array import array
from itertools import takewhile

from decode.drafts.occurrences import END, Tokens


def likeliest(rows: list[Tokens], *, min_probability: float) -> list[int]:
    """The most frequent continuation, token by token, and of equally frequent ones the newest; `rows` are newest first.

    It ends where its probability among the rows falls below `min_probability`. A row says nothing behind its end.
    """
    alive = _counted(rows)
    draft: list[int] = []
    probability = 1.0
    while len(alive) > 1:
        position = len(draft)
        counts: dict[int, int] = {}
        for row, count in alive:
            if position < len(row) and row[position] != END:
                counts[row[position]] = counts.get(row[position], 0) + count
        if not counts:
            return draft
        token = max(counts, key=counts.__getitem__)  # the first of the greatest: the newest
        probability *= counts[token] / sum(counts.values())
        if probability < min_probability:
            return draft
        draft.append(token)
        alive = [(row, count) for row, count in alive if position < len(row) and row[position] == token]
    return [*draft, *takewhile(lambda token: token != END, alive[0][0][len(draft) :])] if alive else draft


def _counted(rows: list[Tokens]) -> list[tuple[Tokens, int]]:
    """Different rows in the order of their first, and how many are equal."""
    if len(rows) == 1:
        return [(rows[0], 1)]
    counts: dict[bytes, int] = {}
    for row in rows:
        counts[row.tobytes()] = counts.get(row.tobytes(), 0) + 1
    return [(array("i", row), count) for row, count in counts.items()]
