"""Unstreamed HTTP answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.problem import Problem, error_object

_json = msgspec.json.Encoder()


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
