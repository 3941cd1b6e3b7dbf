"""OpenAI's response objects, as plain dicts for the JSON encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.messages import TokenLogprobs
from gateway.tokenizer import ChatTokenizer


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object. `cached_tokens` is what the prefill worker's prefix cache held."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
    """`choices[].logprobs` of a completion; `offset` is the text's length before these tokens."""
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {tokenizer.token_text(top_id): top for top_id, top in zip(entry.top_ids, entry.top_logprobs, strict=True)}
            for entry in logprobs
        ],
        "text_offset": offsets,
    }


def _entry(tokenizer: ChatTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}
