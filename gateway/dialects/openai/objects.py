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


def chat_logprobs(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], *, as_ids: bool
) -> Json:
    """`choices[].logprobs` of a chat answer. `as_ids`: tokens are told by their ids."""

    def one(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        token = f"token_id:{token_id}" if as_ids else raw.decode("utf-8", "replace")
        return {"token": token, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}

    content = [
        one(token_id, entry.logprob)
        | {"top_logprobs": [one(top_id, top) for top_id, top in zip(entry.top_ids, entry.top_logprobs, strict=True)]}
        for token_id, entry in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], *, offset: int, as_ids: bool
) -> Json:
    """`choices[].logprobs` of a completion; `offset` is where these tokens begin in the text.

    `top_logprobs` also has the chosen token, as OpenAI's does: up to k + 1 entries.
    """

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)

    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(tokenizer.token_text(token_id))
    names = [name(token_id) for token_id in token_ids]
    tops = []
    for chosen, entry in zip(names, logprobs, strict=False):
        top = {
            name(top_id): max(value, MIN_LOGPROB)
            for top_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        tops.append({chosen: max(entry.logprob, MIN_LOGPROB)} | top)
    return {
        "tokens": names,
        "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
