"""Parts of OpenAI's answers, as plain dicts for the JSON encoder."""

from __future__ import annotations

from collections.abc import Sequence

from common.messages import TokenLogprobs
from gateway.answers.answer import Answer, Usage
from gateway.answers.tokenizer import ChatTokenizer
from gateway.http.problem import Json

MIN_LOGPROB = -9999.0  # JSON has no infinity
USAGE: Json = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
}


def head(answer: Answer, kind: str) -> Json:
    """The fields that every object of an answer carries."""
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def usage_object(usage: Usage) -> Json:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def chat_logprobs(tokenizer: ChatTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
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
) -> Json:
    """`choices[].logprobs` of a completion; `offset` is where these tokens begin in the text.

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
            tokenizer.token_text(top_id): max(value, MIN_LOGPROB)
            for top_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        tops.append({text: max(entry.logprob, MIN_LOGPROB)} | top)
    return {
        "tokens": texts,
        "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _entry(tokenizer: ChatTokenizer, token_id: int, logprob: float) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}
