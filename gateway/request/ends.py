"""The ways in which an attempt ends early, and their meaning for the request: docs/failures.md has the table."""

from __future__ import annotations

from enum import Enum

from common.errors import PlaceAgainError, QuarantinedError, ServingError, StepFailedError, UnavailableError

MAX_HARMED = 3  # passes that failed with it
MAX_FAILED = 10  # attempts lost on the way, without progress in between
FREE_ATTEMPTS = 2  # retried without a pause
PAUSE_S, MAX_PAUSE_S = 0.1, 2.0


class Sign(Enum):
    """The significance of an attempt's end."""

    NOTHING = "nothing"
    FAILED = "its way failed"
    HARMED = "it may have broken a pass"


class End(Enum):
    """A reason for abandoning an attempt."""

    PREEMPTED = "its place went to another tenant", Sign.NOTHING
    REASONING_ENDED = "its client ended the reasoning", Sign.NOTHING
    ROLE_LOST = "the worker takes no such work any more", Sign.NOTHING
    PLACE_AGAIN = "no candidate takes sequences", Sign.NOTHING
    NOT_CLAIMED = "not claimed", Sign.NOTHING
    NOT_BEGUN = "worker lost before it began", Sign.NOTHING
    STOPPED = "worker told to stop", Sign.NOTHING
    BUS_LOST = "the bus was lost", Sign.NOTHING
    QUEUE_LOST = "the queue gave the job up", Sign.FAILED
    WORKER_LOST = "worker lost", Sign.FAILED
    REQUEST_LOST = "the worker lost the request", Sign.FAILED
    UNANSWERED = "the worker doesn't answer", Sign.FAILED
    TOKENS_MISSING = "tokens are missing", Sign.FAILED
    NOT_TAKEN_OVER = "nobody took the sequence over", Sign.FAILED
    WORKER_FAILED = "the worker reports a failure", Sign.FAILED
    PASS_FAILED = "a pass failed", Sign.HARMED

    def __init__(self, text: str, sign: Sign) -> None:
        self.text = text
        self.sign = sign

    @classmethod
    def of_code(cls, code: str) -> End:
        """The end reported by a worker's `Failed`."""
        return {PlaceAgainError.code: cls.PLACE_AGAIN, StepFailedError.code: cls.PASS_FAILED}.get(
            code, cls.WORKER_FAILED
        )


def verdict(*, failed: int, harmed: int) -> ServingError | None:
    """The error that ends a request; None: another attempt."""
    if harmed >= MAX_HARMED:
        return QuarantinedError(f"{harmed} passes with it failed")
    if failed >= MAX_FAILED:
        return UnavailableError(f"{failed} attempts failed on their way")
    return None


def pause_s(end: End, fruitless: int) -> float:
    """Seconds before the next attempt, after so many without progress."""
    if fruitless <= FREE_ATTEMPTS or (end.sign is Sign.NOTHING and end is not End.PLACE_AGAIN):
        return 0.0
    return min(MAX_PAUSE_S, PAUSE_S * 2.0 ** min(fruitless - FREE_ATTEMPTS - 1, 10))
