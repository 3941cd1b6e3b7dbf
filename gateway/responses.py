"""OpenAI's response objects, as plain dicts for the JSON encoder, and what HTTP status each error becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    ServingError,
    UnavailableError,
)
from common.messages import TokenLogprobs
from gateway.tokenizer import ChatTokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity
_json = msgspec.json.Encoder()


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for the answer that was asked for."""


class ModelNotFoundError(InvalidRequestError):
    """Another model than the served one was asked for."""


class NotKeptError(InvalidRequestError):
    """There is no such file or batch, or it is somebody else's."""

    code = "not_found"


class ConflictError(InvalidRequestError):
    """What is asked for does not go together with how things are."""

    code = "conflict"


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object. `cached_tokens` is what the prefill worker's prefix cache held."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def error_status(error: ServingError) -> tuple[int, str]:
    """Return the HTTP status and OpenAI's `type` of `error`."""
    match error:
        case ModelNotFoundError() | NotKeptError():
            return 404, "invalid_request_error"
        case ConflictError():
            return 409, "invalid_request_error"
        case InvalidRequestError():
            return 400, "invalid_request_error"
        case OverloadedError():
            return 429, "rate_limit_error"
        case UnavailableError():
            return 503, "service_unavailable_error"
        case DeadlineExceededError():
            return 504, "timeout_error"
        case _:
            return 500, "server_error"


def error_code(error: ServingError) -> str:
    """Return OpenAI's `code`: clients tell some wrong requests apart by it. Elsewhere it is the code on the wire."""
    match error:
        case ContextLengthError():
            return "context_length_exceeded"
        case ModelNotFoundError():
            return "model_not_found"
        case _:
            return error.code


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> Response:
    """An answer that is an error."""
    return json_response(error_body(message, kind=kind, param=param, code=code), status=status)


def json_response(content: dict[str, Any], *, status: int = 200) -> Response:
    """An answer of one JSON object."""
    return Response(_json.encode(content), status, media_type="application/json")


def chat_logprobs(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = [
        _entry(tokenizer, token_id, entry.logprob)
        | {
            "top_logprobs": [
                _entry(tokenizer, top_id, top) for top_id, top in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ]
        }
        for token_id, entry in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], *, offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where the first of these tokens begins in the answer's text.

    `top_logprobs` also has the chosen token, as OpenAI's does: up to k + 1 entries.
    """
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = []
    for text, entry in zip(texts, logprobs, strict=False):
        top = {
            tokenizer.token_text(top_id): max(value, LEAST_LOGPROB)
            for top_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        tops.append({text: max(entry.logprob, LEAST_LOGPROB)} | top)
    return {
        "tokens": texts,
        "token_logprobs": [max(entry.logprob, LEAST_LOGPROB) for entry in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _entry(tokenizer: ChatTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}
