"""Tombstones of ended attempts: a job or reservation that arrives after its cancellation must not start."""

from __future__ import annotations

from collections import OrderedDict

from common.messages import Cancel, Job

MAX_TOMBSTONES = 10_000


class Tombstones:
    """The newest ended attempt of each request, up to a bound. The gateway's claim is the real fence."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def add(self, request_id: str, attempt: int) -> None:
        """Mark attempts up to `attempt` as ended."""
        self._attempts[request_id] = max(attempt, self._attempts.pop(request_id, 0))
        if len(self._attempts) > MAX_TOMBSTONES:
            self._attempts.popitem(last=False)

    def covers(self, request_id: str, attempt: int) -> bool:
        return attempt <= self._attempts.get(request_id, 0)


class Cancelled:
    """Cancelled attempts by gateway: a gateway's cancellation affects its own requests only."""

    def __init__(self) -> None:
        self._ended = Tombstones()

    def add(self, message: Cancel) -> None:
        """Record a gateway's cancellation of its own request, which may not have arrived yet."""
        self._ended.add(f"{message.gateway} {message.request_id}", message.attempt)

    def covers(self, job: Job) -> bool:
        """True if the job's own gateway cancelled it; a gateway of release 0.1.0 sends no name."""
        return any(self._ended.covers(f"{gateway} {job.request_id}", job.attempt) for gateway in (job.gateway, ""))
