"""OpenAI's answers for the OpenAPI document. Further fields may be added."""

from __future__ import annotations

from gateway.http.api import fields, ref
from gateway.http.problem import Json

_TEXT: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_INTEGER_OR_NULL: Json = {"type": ["integer", "null"]}
_NUMBER: Json = {"type": "number"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_INTEGERS: Json = {"type": "array", "items": _INTEGER}


def _fields(required: Json, **others: Json) -> Json:
    """An object of which only the `required` fields are always present."""
    return fields(required) | {"properties": required | others}


def _list(items: Json, **rules: int) -> Json:
    return {"type": "array", "items": items, **rules}


def _or_null(name: str) -> Json:
    return {"anyOf": [ref(name), {"type": "null"}]}


def _answer(kind: str, choice: str, *, at_least: int = 1) -> Json:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _INTEGER, "model": _TEXT}
    return _fields(
        head | {"choices": _list(ref(choice), minItems=at_least)}, usage=_or_null("Usage"), timings=ref("Timings")
    )


_CALLED = _fields({"name": _TEXT, "arguments": _TEXT})
_SAID = {"refusal": _TEXT_OR_NULL, "reasoning_content": _TEXT_OR_NULL}
_ENDING = {"index": _INTEGER, "finish_reason": _TEXT_OR_NULL}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": {"anyOf": [_INTEGERS, {"type": "null"}]}}

ANSWERS: dict[str, Json] = {
    "Model": fields(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _INTEGER,
            "owned_by": _TEXT,
            "root": _TEXT,
            **dict.fromkeys(("max_model_len", "whole_model_len", "whole_kv_memory_mb"), _INTEGER_OR_NULL),
            "tool_call_format": _TEXT_OR_NULL,
            "reasoning_format": _TEXT_OR_NULL,
            "capabilities": _list({"enum": ["completion", "chat", "embedding", "score"]}),
        }
    ),
    "ModelList": fields({"object": {"const": "list"}, "data": _list(ref("Model"))}),
    "ToolCall": _fields({"id": _TEXT, "type": _TEXT, "function": _CALLED}),
    "ToolCallDelta": _fields({"index": _INTEGER}, id=_TEXT, type=_TEXT, function=_fields({}, name=_TEXT, arguments=_TEXT)),
    "ChatMessage": _fields(
        {"role": {"const": "assistant"}, "content": _TEXT_OR_NULL}, tool_calls=_list(ref("ToolCall")), **_SAID
    ),
    "ChatDelta": _fields({}, role={"const": "assistant"}, content=_TEXT_OR_NULL, tool_calls=_list(ref("ToolCallDelta")), **_SAID),
    "TokenLogprob": _fields(_TOKEN),
    "ChatLogprob": _fields(_TOKEN | {"top_logprobs": _list(ref("TokenLogprob"))}),
    "ChatLogprobs": _fields({"content": {"anyOf": [_list(ref("ChatLogprob")), {"type": "null"}]}}),
    "CompletionLogprobs": _fields(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list({"type": ["number", "null"]}),
            "top_logprobs": _list({"type": ["object", "null"], "additionalProperties": _NUMBER}),
            "text_offset": _INTEGERS,
        }
    ),
    "ChatChoice": _fields(
        _ENDING | {"message": ref("ChatMessage"), "logprobs": _or_null("ChatLogprobs")}, token_ids=_INTEGERS
    ),
    "ChatChunkChoice": _fields(
        _ENDING | {"delta": ref("ChatDelta"), "logprobs": _or_null("ChatLogprobs")}, token_ids=_INTEGERS
    ),
    "CompletionChoice": _fields(
        _ENDING | {"text": _TEXT, "logprobs": _or_null("CompletionLogprobs")}, token_ids=_INTEGERS
    ),
    "ChatCompletion": _answer("chat.completion", "ChatChoice"),
    "ChatCompletionChunk": _answer("chat.completion.chunk", "ChatChunkChoice", at_least=0),
    "Completion": _answer("text_completion", "CompletionChoice"),
    "Timings": _fields(
        {"cache_n": _INTEGER, "ttft_ms": _NUMBER}
        | {f"{name}_n": _INTEGER for name in ("prompt", "predicted")}
        | {
            f"{name}_{what}": _NUMBER
            for name in ("prompt", "predicted")
            for what in ("ms", "per_token_ms", "per_second")
        }
    ),
    "Usage": _fields(
        dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _INTEGER),
        prompt_tokens_details=_fields({"cached_tokens": _INTEGER}),
        completion_tokens_details=_fields(
            dict.fromkeys(("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"), _INTEGER)
        ),
    ),
}  # fmt: skip
