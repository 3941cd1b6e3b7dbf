"""Reasons for a prefill worker to stop a request, and the error that its gateway gets."""

from __future__ import annotations

from enum import Enum

from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PlaceAgainError,
    ServingError,
    StepFailedError,
    WorkerFailedError,
)


class Stop(Enum):
    """A reason with its error, which says if another attempt may help."""

    # The request is no longer wanted: the gateway abandoned the attempt, or is gone.
    CANCELLED = "cancelled", None
    SUPERSEDED = "superseded", None
    GATEWAY_LOST = "gateway lost", None
    DEADLINE = "deadline", None
    # The work never started: place the request again, without counting an attempt.
    NOBODY_DECODES = "no candidate takes sequences any more", PlaceAgainError
    NOBODY_ANSWERS = "no decode worker answers", PlaceAgainError
    # It can't be done in time, here or elsewhere.
    LATE = "the first token can't come in time", DeadlineExceededError
    # The attempt failed; another one may work.
    REFUSED = "every candidate refuses the attempt for good", WorkerFailedError
    DECODER_LOST = "decode worker lost", WorkerFailedError
    NO_LINK = "no link", WorkerFailedError
    STEP_FAILED = "step failed", StepFailedError
    LEASE_ABORTED = "lease aborted", WorkerFailedError
    HANDOFF_FAILED = "handoff failed", WorkerFailedError
    BUS_LOST = "worker lost the bus", WorkerFailedError
    WORKER_STOPPED = "worker stopped", WorkerFailedError
    # No attempt can work.
    INVALID = "no decode worker can take this request", InvalidRequestError
    UNFOLLOWABLE = "no token can follow", InvalidRequestError

    def __init__(self, text: str, error: type[ServingError] | None) -> None:
        self.text = text
        self.error = error
