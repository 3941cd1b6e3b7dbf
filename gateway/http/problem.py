"""Errors of a request in neutral form, before a dialect writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    QuarantinedError,
    RateLimitedError,
    ServingError,
    UnavailableError,
)

Json = dict[str, Any]
REFUSALS = (429, 503)  # their answers have a Retry-After


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for the answer. `excess` is both in tokens, as "4001 tokens > 2048"; "": unknown."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None, excess: str = "") -> None:
        super().__init__(message, param=param)
        self.excess = excess


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that is not served."""

    code = "model_not_found"


class UnauthorizedError(ServingError):
    """No valid key came with the request."""

    code = "invalid_api_key"


class NotKeptError(InvalidRequestError):
    """There is no such file, batch or running answer for this tenant."""

    code = "not_found"


class ConflictError(InvalidRequestError):
    """The request contradicts the present state."""

    code = "conflict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error in terms of HTTP."""

    status: int
    message: str
    code: str = ""  # clients may branch on it; "": none
    param: str | None = None  # the invalid field
    excess: str = ""  # see `ContextLengthError`
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


INTERNAL = Problem(status=500, message="internal error", code="internal")


def problem_of(error: ServingError) -> Problem:
    """The HTTP status and headers of `error`, decided here alone."""
    status = _status(error)
    headers: dict[str, str] = {}
    if status in REFUSALS:
        retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else 1.0
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, RateLimitedError):
        headers |= error.headers
    if isinstance(error, QuarantinedError):
        headers["x-should-retry"] = "false"  # OpenAI's clients retry a 500; this request must not come again
    excess = error.excess if isinstance(error, ContextLengthError) else ""
    return Problem(
        status=status, message=error.message, code=error.code, param=error.param, excess=excess, headers=headers
    )


def _status(error: ServingError) -> int:
    match error:
        case UnauthorizedError():
            return 401
        case ModelNotFoundError() | NotKeptError():
            return 404
        case ConflictError():
            return 409
        case InvalidRequestError():
            return 400
        case OverloadedError():
            return 429
        case UnavailableError():
            return 503
        case DeadlineExceededError():
            return 504
        case _:
            return 500


_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}


def error_object(problem: Problem) -> Json:
    """OpenAI's error object, also for paths without a dialect."""
    kind = _KINDS.get(problem.status, "invalid_request_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code or None}}
