"""The drafts of a sequence so far: how they fare against the usual, and pauses after failures."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

LEAST, GREATEST = 0.01, 0.98  # no draft is hopeless or certain
LEAST_MISSES, MOST_MISSES = 2, 8  # verifications in a row that accept nothing, before a pause
# A pause begins before, where so many misses in a row are less probable than this.
UNLIKELY = 0.02
MOST_UNPAID = 8  # passes in a row that leave its drafts out, before a pause
SHORTEST_PAUSE, LONGEST_PAUSE, LONGEST_UNPAID = 8, 128, 32  # tokens
Numbers: TypeAlias = npt.NDArray[np.float64]
_MEMORY = 0.8  # weight of earlier tokens after a verification
_WEIGHT = 4.0  # tokens that a sequence counts as usual for


class History:
    """An exponential average of accepted against expected tokens, and what leads to pauses: misses and unpaid drafts."""

    __slots__ = ("_misses", "_unpaid", "accepted", "expected", "match_length")

    def __init__(self) -> None:
        self.match_length = 0  # the last verified draft's
        self.accepted = 0.0
        self.expected = 0.0
        self._misses = 0
        self._unpaid = 0

    def acceptance(self, usual: float) -> float:
        """The probability that a drafted token is accepted: the usual one for its match, by how the record compares."""
        weight = _WEIGHT * usual
        return min(GREATEST, max(LEAST, usual * (self.accepted + weight) / (self.expected + weight)))

    def pays(self, match_length: int) -> None:
        """Take note that a pass verifies its draft."""
        self.match_length = match_length
        self._unpaid = 0

    def does_not_pay(self) -> int:
        """Take note that a pass leaves its draft out. Returns the tokens of the pause behind it, or 0."""
        self._unpaid += 1
        return _pause(self._unpaid - MOST_UNPAID, longest=LONGEST_UNPAID)

    def verified(self, *, usual: float, tried: int, accepted: int) -> int:
        """Learn from a verified draft. Returns the tokens of the pause behind it, or 0."""
        self.accepted = self.accepted * _MEMORY + accepted
        self.expected = self.expected * _MEMORY + usual * tried
        self._misses = 0 if accepted else self._misses + 1
        if accepted:
            return 0
        return _pause(self._misses - _too_many_misses(usual), longest=LONGEST_PAUSE)


def _too_many_misses(usual: float) -> int:
    """Misses in a row that chance does not explain where the usual share of first tokens is accepted."""
    unlikely = math.ceil(math.log(UNLIKELY) / math.log(1 - min(GREATEST, max(LEAST, usual))))
    return max(LEAST_MISSES, min(MOST_MISSES, unlikely))


def _pause(doublings: int, *, longest: int) -> int:
    """A pause of twice as many tokens as the time before; it tries once behind each. None for a negative number."""
    return min(longest, SHORTEST_PAUSE << min(doublings, longest.bit_length())) if doublings >= 0 else 0


def acceptances(usual: Numbers, *, accepted: Numbers, expected: Numbers) -> Numbers:
    """`History.acceptance` of many."""
    weight = _WEIGHT * usual
    return np.clip(usual * (accepted + weight) / (expected + weight), LEAST, GREATEST)
