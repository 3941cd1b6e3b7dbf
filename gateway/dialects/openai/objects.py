"""Parts of OpenAI's answers, as plain dicts for the JSON encoder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from common.messages import TokenLogprobs
from gateway.answers.answer import Answer, Usage
from gateway.answers.choice import ScoredPrompt
from gateway.answers.tokenizer import ChatTokenizer
from gateway.http.problem import Json

MIN_LOGPROB = -9999.0  # JSON has no infinity


def head(answer: Answer, kind: str) -> Json:
    """Fields of every object of an answer."""
    fingerprint = f"fp_{answer.weights[:12]}" if answer.weights else None
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "system_fingerprint": fingerprint,
    }


def usage_object(usage: Usage) -> Json:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, "audio_tokens": 0},
    }


def chat_logprobs(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], *, as_ids: bool
) -> Json:
    """`choices[].logprobs` of a chat answer. `as_ids`: tokens are identified by id."""

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
    tokenizer: ChatTokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    offset: int,
    as_ids: bool,
    prompt: ScoredPrompt | None = None,
) -> Json:
    """`choices[].logprobs` of a completion; `offset` is these tokens' position in the text, after an echoed `prompt`.

    `top_logprobs` also has the chosen token, as OpenAI's does: up to k + 1 entries. Of a prompt's first token nothing is known.
    """

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)

    def top(token_id: int, entry: TokenLogprobs) -> Json:
        likely = zip(entry.top_ids, entry.top_logprobs, strict=True)
        chosen = {name(token_id): max(entry.logprob, MIN_LOGPROB)}
        return chosen | {name(other): max(value, MIN_LOGPROB) for other, value in likely}

    known: list[tuple[int, TokenLogprobs | None]] = []
    if prompt is not None:
        known = [(prompt.token_ids[0], None), *((token_id, entry) for token_id, _, entry in prompt.entries())]
    known += zip(token_ids, logprobs, strict=False)
    ends = list(itertools.accumulate((len(tokenizer.token_text(token_id)) for token_id, _ in known), initial=offset))
    return {
        "tokens": [name(token_id) for token_id, _ in known],
        "token_logprobs": [None if entry is None else max(entry.logprob, MIN_LOGPROB) for _, entry in known],
        "top_logprobs": [None if entry is None else top(token_id, entry) for token_id, entry in known],
        "text_offset": ends[:-1],
    }


def prompt_logprobs(tokenizer: ChatTokenizer, prompt: ScoredPrompt) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token and the likeliest. The first token has none."""

    def one(token_id: int, logprob: float, rank: int) -> Json:
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    found: list[Json | None] = [None]
    for token_id, rank, entry in prompt.entries():
        likely = enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
        tops = {str(other): one(other, logprob, place) for place, (other, logprob) in likely}
        found.append({str(token_id): one(token_id, entry.logprob, rank)} | tops)
    return found
