"""When a request's tokens came: its newest frames are left out beyond a bound."""

from __future__ import annotations

from array import array

MAX_FRAMES = 2048  # kept of one request, 6 bytes each


class FramesSeen:
    """Instants of frames, and their tokens."""

    __slots__ = ("_ms", "_tokens")

    def __init__(self) -> None:
        self._ms = array("f")
        self._tokens = array("H")

    def add(self, ms: float, num_tokens: int) -> None:
        """`ms` since the request was received."""
        if len(self._ms) < MAX_FRAMES:
            self._ms.append(ms)
            self._tokens.append(num_tokens if num_tokens <= 0xFFFF else 0xFFFF)

    @property
    def ms(self) -> list[float]:
        return [round(ms, 3) for ms in self._ms]

    @property
    def tokens(self) -> list[int]:
        return list(self._tokens)
