"""SageMaker's two paths as one entry."""

from __future__ import annotations

from common.errors import UnavailableError
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked, Dialect, DialectPaths
from gateway.dialects.sagemaker.invocation import Invocation, Invocations
from gateway.http.api import ApiPart, get, post
from gateway.http.problem import Json, Problem, error_object
from gateway.http.streaming import EVENTS

PING, INVOCATIONS = "/ping", "/invocations"


def _ping(answers: Answers, asked: Asked) -> None:
    """Return 200 with an empty body while requests are served. Raises UnavailableError."""
    if answers.generations.not_ready_reason:
        raise UnavailableError(answers.generations.not_ready_reason)


def _error(problem: Problem, request_id: str) -> tuple[int, Json]:
    return problem.status, error_object(problem)


DIALECT = Dialect(
    name="sagemaker",
    paths=DialectPaths(
        endpoints={INVOCATIONS: Invocations()},
        views={PING: _ping},
        open_paths=(PING,),
    ),
    error=_error,
    api=ApiPart(
        paths={
            INVOCATIONS: {"post": post(Invocation, {}, stream_type=EVENTS)},
            PING: {"get": get(PING, "200 while requests are served.")},
        },
        bodies=(Invocation,),
    ),
)
