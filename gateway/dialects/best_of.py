"""The most likely of several texts, for `best_of`."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.answers.choice import Piece


def by_likelihood(pieces: Sequence[Piece]) -> list[int]:
    """Indices of whole choices with logprobs, by mean logprob, highest first."""
    return sorted(range(len(pieces)), key=lambda place: _mean_logprob(pieces[place]), reverse=True)


def _mean_logprob(piece: Piece) -> float:
    values = [entry.logprob for entry in piece.logprobs]
    return sum(values) / len(values) if values else float("-inf")
