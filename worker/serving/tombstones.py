"""Attempts that are over: a job or a reservation that arrives after its cancellation must not start."""

from __future__ import annotations

from collections import OrderedDict

MAX_TOMBSTONES = 10_000


class Tombstones:
    """The newest ended attempt of each request, up to a bound. The gateway's claim is the real fence."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def add(self, request_id: str, attempt: int) -> None:
        """Remember that attempts up to `attempt` are over."""
        self._attempts[request_id] = max(attempt, self._attempts.pop(request_id, 0))
        if len(self._attempts) > MAX_TOMBSTONES:
            self._attempts.popitem(last=False)

    def covers(self, request_id: str, attempt: int) -> bool:
        return attempt <= self._attempts.get(request_id, 0)
