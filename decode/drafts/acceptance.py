"""The probability that a drafted token is accepted, learnt by the length of its match from all sequences."""

from __future__ import annotations

_FIRST_GUESSES = (0.35, 0.5, 0.7, 0.9)  # matches of less than 5, 8, 16 tokens, and of more
_KINDS = (0,) * 5 + (1,) * 3 + (2,) * 8 + (3,)  # by match length
_LONGEST = len(_KINDS) - 1
_FIRST_WEIGHT = 16.0  # tokens that a first guess counts for
_MEMORY = 0.998  # weight of earlier tokens after a verification


class Acceptance:
    """Accepted and tried tokens by class of match, as exponential averages.

    A first guess is never quite forgotten: a class that failed long ago is tried again.
    """

    def __init__(self) -> None:
        self._accepted = [guess * _FIRST_WEIGHT for guess in _FIRST_GUESSES]
        self._tried = [_FIRST_WEIGHT] * len(_FIRST_GUESSES)

    def of(self, match_length: int) -> float:
        kind = _KINDS[min(match_length, _LONGEST)]
        return self._accepted[kind] / self._tried[kind]

    def learn(self, match_length: int, *, tried: int, accepted: int) -> None:
        kind = _KINDS[min(match_length, _LONGEST)]
        self._accepted[kind] = self._accepted[kind] * _MEMORY + accepted + (1 - _MEMORY) * _FIRST_GUESSES[kind]
        self._tried[kind] = self._tried[kind] * _MEMORY + tried + (1 - _MEMORY)
