"""Copies of the host tier that the test lets land."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from worker.tier.copier import Copy, Over, T


class HandCopier:
    """Runs copies when told to, in order."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Copy[Any], Over[Any]]] = deque()
        self._late: deque[Callable[[], None]] = deque()  # of those that wait, and are not late yet

    def submit(self, copy: Copy[T], over: Over[T], *, late: Callable[[], None], within_s: float) -> None:
        self.waiting.append((copy, over))
        self._late.append(late)

    def delay(self) -> None:
        """Let the time of all that wait pass."""
        while self._late:
            self._late.popleft()()

    def land(self) -> None:
        """Let all copies land, and those that follow them."""
        while self.waiting:
            self.land_one()

    def land_one(self) -> None:
        """Let the oldest copy land, if there is one."""
        if self.waiting:
            copy, over = self.waiting.popleft()
            if len(self._late) > len(self.waiting):
                self._late.popleft()
            try:
                result: Any = copy()
            except Exception as error:
                result = error
            over(result)

    def close(self) -> bool:
        return True
