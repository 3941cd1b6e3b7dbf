"""The `Response` object: the echoed body, its output, and its status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.answers.answer import Answer, Usage
from gateway.http.problem import Json, Problem

QUEUED, IN_PROGRESS, COMPLETED, INCOMPLETE = "queued", "in_progress", "completed", "incomplete"
FAILED, CANCELLED = "failed", "cancelled"
ID_PREFIX = "resp_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A response's id, creation time (s since 1970), and model."""

    id: str
    created_at: int
    model: str

    @classmethod
    def of(cls, answer: Answer) -> Head:
        return cls(id=answer.id, created_at=answer.created, model=answer.model)


def response_object(
    head: Head,
    echoed: Json,
    *,
    status: str,
    output: Sequence[Json] = (),
    usage: Usage | None = None,
    error: Json | None = None,
    completed_at: int | None = None,
) -> Json:
    """The whole object. `echoed`: fields repeated from the body; `error`: see `error_of`."""
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_at,
        "completed_at": completed_at,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
        "model": head.model,
        "output": list(output),
        "usage": None if usage is None else usage_object(usage),
        **echoed,
    }


def usage_object(usage: Usage) -> Json:
    """The `usage` object. Cache writes are not billed, so none are reported."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_of(problem: Problem) -> Json:
    """A failed response's `error`: it has few codes; ours is in the `error` event."""
    code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(problem.status, "server_error")
    return {"code": code, "message": problem.message}
