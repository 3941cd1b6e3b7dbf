"""A request's frames: when its tokens arrived, and how many of them had been drafted."""

from __future__ import annotations

from array import array
from typing import Any

from common.messages import Tokens

MAX_FRAMES = 2048  # kept of one request, 8 bytes each


class FramesSeen:
    """Times of frames and their token counts, as far as they are kept; drafts of all attempts.

    A worker's frames tell its totals of an attempt.
    """

    __slots__ = ("_attempt", "_pairs", "_told", "accepted", "drafted")

    def __init__(self) -> None:
        self.drafted = self.accepted = 0  # tokens that workers verified
        self._pairs = array("f")
        self._attempt, self._told = 0, (0, 0)

    def take(self, tokens: Tokens, ms: float, num_tokens: int) -> None:
        """Add a frame, `ms` after the request was received."""
        if tokens.attempt != self._attempt:
            self._attempt, self._told = tokens.attempt, (0, 0)
        drafted, accepted = max(tokens.drafted, self._told[0]), max(tokens.accepted, self._told[1])
        self.drafted += drafted - self._told[0]
        self.accepted += accepted - self._told[1]
        self._told = drafted, accepted
        self.add(ms, num_tokens)

    def add(self, ms: float, num_tokens: int) -> None:
        """Add a frame without further facts."""
        pairs = self._pairs
        if len(pairs) < 2 * MAX_FRAMES:
            pairs.append(ms)
            pairs.append(num_tokens)

    def as_json(self) -> dict[str, Any]:
        return {
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "frame_ms": [round(ms, 3) for ms in self._pairs[::2]],
            "frame_tokens": [int(count) for count in self._pairs[1::2]],
        }
