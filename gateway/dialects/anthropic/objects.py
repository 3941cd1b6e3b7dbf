"""Parts of Anthropic's answers, as plain dicts for the JSON encoder."""

from __future__ import annotations

from typing import NamedTuple

from pydantic_core import from_json

from common.words import Finish
from gateway.answers.answer import Answer
from gateway.answers.choice import Piece
from gateway.http.problem import Json, Problem
from gateway.parsing.parsed import CallDelta

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
OVERLOADED = 529
# Anthropic's libraries resend the whole conversation for these.
_NO_THREADS: Json = {"error_code": "thread_unsupported_request", "unsupported": []}


class Stop(NamedTuple):
    """The stop reason of an answer."""

    reason: str
    sequence: str | None = None

    @property
    def fields(self) -> Json:
        return {"stop_reason": self.reason, "stop_sequence": self.sequence}


def stop_of(answer: Answer, finish: Finish, max_tokens: int, *, has_calls: bool) -> Stop:
    """A length limit wins over all, a call over a stop sequence. `max_tokens` is the client's."""
    choice = answer.choices[0]
    if finish == Finish.LENGTH:
        return Stop("max_tokens" if choice.max_tokens >= max_tokens else "model_context_window_exceeded")
    if has_calls:
        return Stop("tool_use")
    return Stop("stop_sequence", choice.stop_string) if choice.stop_string is not None else Stop("end_turn")


def usage_object(answer: Answer) -> Json:
    """The counts so far; the prompt's come with the first token. Cached tokens are not in `input_tokens`."""
    usage = answer.usage()
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def message_object(answer: Answer, content: list[Json], stop: Stop | None) -> Json:
    """A whole message, or without `stop` the start of one."""
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        **(stop.fields if stop is not None else {"stop_reason": None, "stop_sequence": None}),
        "usage": usage_object(answer) | {"service_tier": "standard"},
    }


def content_blocks(answer: Answer, piece: Piece) -> list[Json]:
    """All content of a message."""
    found: list[Json] = []
    if piece.reasoning:
        found.append({"type": "thinking", "thinking": piece.reasoning, "signature": signature(answer)})
    if piece.text:
        found.append({"type": "text", "text": piece.text})
    return found + [tool_use(call, input_of(call.arguments)) for call in piece.calls]


def tool_use(call: CallDelta, input_: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input_}


def input_of(arguments: str) -> Json:
    """A call's arguments; if cut off, the complete part, as clients' libraries parse a stream."""
    try:
        value = from_json(arguments, allow_partial=True) if arguments else {}
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def signature(answer: Answer) -> str:
    """A placeholder signature that clients return with the thinking; it is never read."""
    return answer.id.partition("_")[2]


def error_object(problem: Problem) -> Json:
    kind = _KINDS.get(status_of(problem), "invalid_request_error" if problem.status < 500 else "api_error")
    details = {"details": _NO_THREADS} if problem.status == 400 and problem.param == "thread" else {}
    # Agents look for this phrase and then shorten their conversation.
    message = f"prompt is too long: {problem.excess} maximum" if problem.excess else problem.message
    return {"type": "error", "error": {"type": kind, "message": message} | details}


def status_of(problem: Problem) -> int:
    """The status of an error: Anthropic's own for overload and unavailability; a tenant's budget keeps 429."""
    is_full = problem.status == 503 or (problem.status == 429 and problem.code == "overloaded")
    return OVERLOADED if is_full else problem.status
