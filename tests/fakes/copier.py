"""Copies of the host tier that the test lets land."""

from __future__ import annotations

from collections import deque

from worker.tier.copier import Copy, Over


class HandCopier:
    """Runs copies when told to, in order."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Copy, Over]] = deque()

    def submit(self, copy: Copy, over: Over) -> None:
        self.waiting.append((copy, over))

    def land(self) -> None:
        """Let all copies land, and those that follow them."""
        while self.waiting:
            self.land_one()

    def land_one(self) -> None:
        """Let the oldest copy land, if there is one."""
        if self.waiting:
            copy, over = self.waiting.popleft()
            try:
                result: bytes | Exception = copy()
            except Exception as error:
                result = error
            over(result)

    def close(self) -> None: ...
