"""Answers that are whole: JSON, and what went wrong with a request, before a dialect writes it in its own form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

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
_json = msgspec.json.Encoder()


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
    """No valid key came with the request. `challenge`: see `KeyForm`."""

    code = "invalid_api_key"

    def __init__(self, message: str, *, challenge: str = "") -> None:
        super().__init__(message)
        self.challenge = challenge


class NotKeptError(InvalidRequestError):
    """There is no such file, batch or running answer for this tenant."""

    code = "not_found"


class ForbiddenError(InvalidRequestError):
    """The key is valid, and may not do this."""

    code = "forbidden"


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
    if isinstance(error, UnauthorizedError) and error.challenge:
        headers["www-authenticate"] = error.challenge
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
        case ForbiddenError():
            return 403
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


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with one JSON value."""
    return Response(_json.encode(content), status, media_type="application/json", headers=headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """An answer that is more than a JSON value: with its own form, status or headers."""

    body: bytes = b""
    media_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def answer_of(value: Any, *, headers: Mapping[str, str] | None = None) -> Response:
    """Convert a value to an answer: responses and `Content` stay, texts are plain, None has an empty body, others are JSON."""
    match value:
        case Response():
            return value
        case Content():
            return Response(value.body, value.status, {**(headers or {}), **value.headers}, value.media_type)
        case None:
            return Response(headers=headers)
        case str():
            return Response(value, media_type="text/plain", headers=headers)
        case _:
            return json_response(value, headers=headers)


def takes_gzip(request: Request) -> bool:
    """True if the client accepts gzip with a nonzero weight."""
    for offer in request.headers.get("accept-encoding", "").lower().split(","):
        name, _, weight = offer.replace(" ", "").partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False


def plain_error(problem: Problem) -> Response:
    """An error on a path without a dialect."""
    return json_response(error_object(problem), status=problem.status, headers=problem.headers)
