"""TGI's errors: a text and a kind."""

from __future__ import annotations

from gateway.http.problem import Json, Problem

_KINDS = {
    401: "authentication",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    424: "generation",
    429: "overloaded",
    500: "incomplete_generation",
    503: "overloaded",
    504: "timeout",
}
_STATUSES = {400: 422}  # an invalid field


def error_object(problem: Problem) -> Json:
    """The object of an error, also in a stream."""
    return {"error": problem.message, "error_type": _kind(problem)}


def error(problem: Problem, request_id: str) -> tuple[int, Json]:
    """Status and object of an error."""
    status = 424 if _kind(problem) == "generation" else _STATUSES.get(problem.status, problem.status)
    return status, error_object(problem)


def _kind(problem: Problem) -> str:
    if problem.status == 500 and problem.code != "internal":  # a worker failed
        return "generation"
    return _KINDS.get(problem.status, "validation")
