"""Arrival times of a request's tokens; frames beyond a limit are dropped."""

from __future__ import annotations

from array import array

MAX_FRAMES = 2048  # kept of one request, 8 bytes each


class FramesSeen:
    """Times of frames, and their token counts."""

    __slots__ = ("_pairs",)

    def __init__(self) -> None:
        self._pairs = array("f")

    def add(self, ms: float, num_tokens: int) -> None:
        """Add a frame, `ms` after the request was received."""
        pairs = self._pairs
        if len(pairs) < 2 * MAX_FRAMES:
            pairs.append(ms)
            pairs.append(num_tokens)

    @property
    def ms(self) -> list[float]:
        return [round(ms, 3) for ms in self._pairs[::2]]

    @property
    def tokens(self) -> list[int]:
        return [int(count) for count in self._pairs[1::2]]
