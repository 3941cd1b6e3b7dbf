"""Who this worker is, and the head of its messages about a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from msgspec import UnsetType

from common.messages import AttemptMessage, Job


class Head(TypedDict):
    """The first fields of every `WorkerMessage`."""

    request_id: str
    attempt: int
    traceparent: str | UnsetType
    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of a worker: a restart under the same name has another incarnation."""

    worker: str
    incarnation: int

    def head(self, about: Job | AttemptMessage, *, trace: str | UnsetType | None = None) -> Head:
        """The head of a message about this attempt: `Failed(**identity.head(job), …)`.

        `trace`: a span below the attempt's, such as the transfer's; None = the attempt's own.
        """
        own = about.context if isinstance(about, Job) else about.traceparent
        return Head(
            request_id=about.request_id,
            attempt=about.attempt,
            traceparent=own if trace is None else trace,
            worker=self.worker,
            incarnation=self.incarnation,
        )
