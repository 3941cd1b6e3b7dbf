"""Stop strings over a stream of text pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string, across pieces. Withholds text only while it may begin one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that may go out. After a match `matched` is set and nothing more comes."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(text.index(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, _, self.matched = min(found)
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The stream ended: return what was withheld."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` properly begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
