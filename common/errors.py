"""Failures that another process must tell apart. Only the gateway maps them to HTTP statuses."""

from __future__ import annotations

from common.words import Refusal


def text_of(error: BaseException) -> str:
    """Return an error's text for people."""
    return f"{type(error).__name__}: {error}"[:200]


class ServingError(Exception):
    """A request could not be served. `code` travels on the wire, `retryable` says whether another attempt may help."""

    code = "internal"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(ServingError):
    """The client sent something that can never work; `param` names the field."""

    code = "invalid_request"


class OverloadedError(ServingError):
    """No capacity now; `retry_after_s` says when to try again."""

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RateLimitedError(OverloadedError):
    """A tenant's budget of `what` is exhausted. `headers` are for the HTTP answer."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, what: str, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.what = what
        self.headers = headers


class UnavailableError(ServingError):
    """A required part is missing: no live worker, no bus."""

    code = "unavailable"
    retryable = True


class NobodyListensError(UnavailableError):
    """The bus has no listener for the subject: that process is gone, or reconnecting."""


class DeadlineExceededError(ServingError):
    """The request's deadline passed before its answer was complete."""

    code = "deadline_exceeded"


class QuarantinedError(ServingError):
    """The request was given up after it failed on several workers."""

    code = "request_quarantined"


class WorkerFailedError(ServingError):
    """A worker reported that this attempt failed; another attempt may work."""

    code = "worker_failed"
    retryable = True


class StepFailedError(WorkerFailedError):
    """A pass with this request failed."""

    code = "step_failed"


class PlaceAgainError(ServingError):
    """The worker no longer takes this kind of work. Place the request again; this does not count as an attempt."""

    code = "place_again"
    retryable = True


class HandoffRefusedError(ServingError):
    """A lease or a manifest was refused: code reads `refusal`, people read the message."""

    code = "handoff_refused"
    retryable = True

    def __init__(self, refusal: Refusal, what: str = "") -> None:
        super().__init__(f"{what}: {refusal}" if what else str(refusal))
        self.refusal = refusal


class MalformedMessageError(ServingError):
    """Bytes on the bus that no decoder accepts. Counted and dead-lettered."""

    code = "malformed_message"


class ForeignVersionError(MalformedMessageError):
    """A message of a release with an incompatible protocol version."""


_BY_CODE: dict[str, type[ServingError]] = {
    kind.code: kind
    for kind in (
        ServingError,
        InvalidRequestError,
        UnavailableError,
        DeadlineExceededError,
        QuarantinedError,
        WorkerFailedError,
        StepFailedError,
        PlaceAgainError,
        OverloadedError,
    )
}


def error_from_code(code: str, message: str) -> ServingError:
    """Rebuild an error from the wire; an unknown code (a newer peer's) becomes a plain `ServingError`."""
    return _BY_CODE.get(code, ServingError)(message)
