"""Attempts that are over: a job or a reservation that arrives after its cancellation must not start."""

from __future__ import annotations

from collections import OrderedDict

from common.messages import Cancel, Job

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


class Cancelled:
    """The attempts that were cancelled, each by the gateway that owns it: another's word ends nothing that comes later."""

    def __init__(self) -> None:
        self._ended = Tombstones()

    def add(self, message: Cancel) -> None:
        """Remember a gateway's cancellation, for a request of its own that may not have arrived."""
        self._ended.add(f"{message.gateway} {message.request_id}", message.attempt)

    def covers(self, job: Job) -> bool:
        """Whether the job's gateway cancelled it; a gateway of release 0.1.0 says no name."""
        return any(self._ended.covers(f"{gateway} {job.request_id}", job.attempt) for gateway in (job.gateway, ""))
