"""HTTP answers of one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.problem import Problem, error_object

_json = msgspec.json.Encoder()


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of one JSON value."""
    return Response(_json.encode(content), status, media_type="application/json", headers=headers)


def takes_gzip(request: Request) -> bool:
    """Whether the client reads gzip, and doesn't weigh it with 0."""
    for offer in request.headers.get("accept-encoding", "").lower().split(","):
        name, _, weight = offer.replace(" ", "").partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False


def plain_error(problem: Problem) -> Response:
    """An error on a path of no dialect."""
    return json_response(error_object(problem), status=problem.status, headers=problem.headers)
