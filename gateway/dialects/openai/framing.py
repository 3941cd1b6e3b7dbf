"""The common part of chat and completions: shared fields, the chunks of a stream, the whole object."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from common.messages import SamplingParams, TokenLogprobs
from common.tracing import Attributes
from common.words import Finish
from gateway.answers.answer import Answer, Usage
from gateway.answers.ask import (
    Ask,
    Constraint,
    ContextFit,
    DraftWish,
    Prompt,
    Reply,
    Sampling,
    Terms,
    TextRules,
    TokenLimits,
)
from gateway.answers.choice import Choice, Piece, ScoredPrompt
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects.best_of import by_likelihood
from gateway.dialects.described import described as attributes
from gateway.dialects.openai.shared import CommonFields
from gateway.dialects.timings import timings_object
from gateway.http.problem import Json, Problem, error_object
from gateway.http.streaming import event, said

MIN_LOGPROB = -9999.0  # JSON has no infinity
DONE = b"data: [DONE]\n\n"
Body = TypeVar("Body", bound=CommonFields)
_SAME_NAMES = (
    "temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


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
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
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


def asked(
    body: CommonFields,
    *,
    answer_prefix: str,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    n: int | None = None,
    field_names: Mapping[str, str] | None = None,
    reply: Reply | None = None,
) -> Ask:
    """Return a body's ask, given its prompts and the fields that chat and completions name differently."""
    return Ask(
        model=body.model,
        answer_prefix=answer_prefix,
        prompts=prompts,
        stream=body.stream,
        sampling=Sampling(
            params=_sampling(body, max_tokens, logprobs, prompt_logprobs),
            left_open=frozenset(name for name in (*_SAME_NAMES, "top_k") if getattr(body, name) is None),
            n=n or body.n or 1,
            seed=None if body.seed is None else body.seed % 2**64,
            ignore_eos=body.ignore_eos,
            drafts=_drafts(body),
        ),
        constraint=Constraint(
            grammar=body.followed,
            limits=TokenLimits(allowed=body.allowed_token_ids or (), bad_words=body.bad_words or ()),
        ),
        fit=ContextFit(longest_prompt=body.truncate_prompt_tokens),
        text=TextRules(
            stops=body.stop or [],
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            is_wanted=max_tokens != 0,
        ),
        reply=reply,
        terms=Terms(
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            deadline_s=body.timeout,
            first_token_s=body.ttft_timeout,
            goal=body.goal,
            keep=body.keep,
        ),
        field_names=field_names or {},
    )


def _drafts(body: CommonFields) -> DraftWish:
    """The wish for drafts."""
    prediction = "" if body.prediction is None else body.prediction.text
    return DraftWish.of(body.speculation, prediction)


def _sampling(
    body: CommonFields, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Sampling parameters, as far as the body has them."""
    given: dict[str, Any] = {name: float(value) for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **given,
        top_k=max(0, body.top_k or 0),
        logit_bias={int(token): float(bias) for token, bias in (body.logit_bias or {}).items()},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=max_tokens or 0,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=body.stop_token_ids or [],
    )


def described(body: CommonFields, max_tokens: int | None) -> Attributes:
    """The request as attributes of its span."""
    return attributes(
        model=body.model,
        stream=body.stream,
        choices=body.n,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
    )


class Chunks(Generic[Body]):
    """The events of a stream. `opening` is a choice's first entry, `content` that of a piece.

    Most events differ in their text alone: the JSON around it is made once for each choice. `has_more`: an entry tells more
    than text.
    """

    def __init__(
        self,
        body: Body,
        answer: Answer,
        head: Json,
        *,
        opening: Callable[[Body, Answer, Choice], Json | None],
        content: Callable[[Body, Answer, Piece], Json],
        has_more: bool,
    ) -> None:
        self._body = body
        self._answer = answer
        self._head = head
        self._opening = opening
        self._content = content
        self._usage: Json = {"usage": None} if body.include_usage else {}
        self.tell_text_alone = not (
            has_more or body.continuous_usage or body.timings_per_token or body.return_token_ids
        )
        self._around: dict[tuple[int, bool], list[bytes]] = {}  # (choice, is reasoning) -> bytes around its text
        self._latest: Choice | None = None
        self._latest_reasons = False
        self._latest_around: list[bytes] = []

    def opening(self) -> bytes:
        firsts = (self._opening(self._body, self._answer, choice) for choice in self._answer.choices)
        return b"".join(self._event(first) for first in firsts if first is not None)

    def event(self, choice: Choice, piece: Piece) -> bytes:
        text, reasoning = piece.text, piece.reasoning
        is_more = piece.finish or piece.calls or piece.prompt is not None or (text and reasoning)
        if is_more or not self.tell_text_alone:
            return self._varied(choice, piece)
        if not text and not reasoning:
            return b""  # held back: it may become a stop string, or markup
        return said(text or reasoning).join(self._frame(choice, is_reasoning=not text))

    def text(self, choice: Choice, text: str) -> bytes:
        if choice is not self._latest or choice.is_reasoning is not self._latest_reasons:
            self._latest, self._latest_reasons = choice, choice.is_reasoning
            self._latest_around = self._frame(choice, is_reasoning=choice.is_reasoning)
        return said(text).join(self._latest_around)

    def _frame(self, choice: Choice, *, is_reasoning: bool) -> list[bytes]:
        """Return the JSON around a text."""
        around = self._around.get((choice.index, is_reasoning))
        if around is None:
            mark = uuid.uuid4().hex
            marked = Piece(text="", reasoning=mark) if is_reasoning else Piece(text=mark)
            around = self._around[choice.index, is_reasoning] = self._varied(choice, marked).split(said(mark))
        return around

    def closing(self) -> bytes:
        sums = _sums(self._body, self._answer)
        return (event(self._head | {"choices": []} | sums) if sums else b"") + DONE

    def failed(self, problem: Problem) -> bytes:
        """The error event of a stream, which no `[DONE]` follows."""
        return event(error_object(problem))

    def _varied(self, choice: Choice, piece: Piece) -> bytes:
        """An event that may differ from the previous one in anything."""
        body, answer = self._body, self._answer
        says = piece.text or piece.reasoning or piece.calls or piece.finish
        if not (says or piece.logprobs or body.return_token_ids):
            return b""
        if body.continuous_usage:
            self._usage["usage"] = usage_object(answer.usage())
        if body.timings_per_token:
            self._usage["timings"] = timings_object(answer)
        entry: Json = {"index": choice.index}
        entry.update(self._content(body, answer, piece))
        entry["finish_reason"] = _finish_reason(body, piece)
        if body.return_token_ids:
            entry["token_ids"] = piece.token_ids
        return self._event(entry)

    def _event(self, entry: Json) -> bytes:
        return event(self._head | {"choices": [entry]} | self._usage)


def _sums(body: CommonFields, answer: Answer) -> Json:
    """Return the usage and timings of the last chunk, if requested."""
    usage = {"usage": usage_object(answer.usage())} if body.include_usage else {}
    return usage | ({"timings": timings_object(answer)} if body.ends_with_timings else {})


async def whole(
    body: Body,
    answer: Answer,
    head: Json,
    content: Callable[[Body, Answer, int, Piece], Json],
    *,
    best: int | None = None,
) -> Json:
    """The object of a whole answer. `content` builds a choice's, by its index; `best`: choices returned for each prompt."""
    pieces = await answer.whole()
    shown: Sequence[int] = range(len(pieces)) if best is None else _likeliest(pieces, answer.choices_per_prompt, best)
    choices = [
        {"index": index} | content(body, answer, made, pieces[made]) | _ending(body, pieces[made])
        for index, made in enumerate(shown)
    ]
    told = head | {"choices": choices, "usage": usage_object(answer.usage())}
    return told | {"timings": timings_object(answer)} if body.timings_per_token else told


def _likeliest(pieces: Sequence[Piece], each: int, best: int) -> list[int]:
    """Indices of the `best` choices among each prompt's `each`."""
    starts = range(0, len(pieces), each)
    return [start + place for start in starts for place in by_likelihood(pieces[start : start + each])[:best]]


def _ending(body: CommonFields, piece: Piece) -> Json:
    """The end of an entry in `choices`."""
    ending: Json = {"finish_reason": _finish_reason(body, piece)}
    return ending | {"token_ids": piece.token_ids} if body.return_token_ids else ending


def _finish_reason(body: CommonFields, piece: Piece) -> str | None:
    if piece.has_calls and piece.finish == Finish.STOP:
        return body.finish_of_calls
    return piece.finish or None
