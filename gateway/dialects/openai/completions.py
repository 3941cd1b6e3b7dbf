"""POST /v1/completions."""

from __future__ import annotations

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Infill, Prompt, Text, TokenIds
from gateway.answers.choice import Choice, Piece
from gateway.dialects.dialect import Events
from gateway.dialects.openai import framing
from gateway.dialects.openai.framing import completion_logprobs, head, prompt_logprobs
from gateway.dialects.openai.schema import CompletionRequest
from gateway.http.problem import Json
from gateway.http.streaming import EVENTS

KIND = "text_completion"


class Completions:
    """Prompts in, texts out."""

    operation = "text_completion"
    stream_type = EVENTS
    is_batchable = True

    def __init__(self, body: type[CompletionRequest] = CompletionRequest) -> None:
        self.body = body

    def ask(self, body: CompletionRequest) -> Ask:
        logprobs = body.logprobs
        return framing.asked(
            body,
            answer_prefix="cmpl-",
            prompts=[_prompt(body, prompt) for prompt in body.prompts],
            n=body.best_of,
            max_tokens=body.max_tokens,
            logprobs=0 if logprobs is None and body.ranks else logprobs,
            prompt_logprobs=body.logprobs if body.echoes_logprobs else body.prompt_logprobs,
            field_names={"prompt_logprobs": "logprobs"} if body.echoes_logprobs else None,
        )

    def events(self, body: CompletionRequest, answer: Answer) -> Events:
        first, has_more = head(answer, KIND), body.logprobs is not None
        return framing.Chunks(body, answer, first, opening=_opening, content=_text, has_more=has_more)

    async def whole(self, body: CompletionRequest, answer: Answer) -> Json:
        best = (body.n or 1) if body.ranks else None
        return await framing.whole(body, answer, head(answer, KIND), _whole_text, best=best)

    def describe(self, body: CompletionRequest) -> Attributes:
        return framing.described(body, body.max_tokens)


def _prompt(body: CompletionRequest, prompt: str | list[int]) -> Prompt:
    if not isinstance(prompt, str):
        return TokenIds(prompt)
    if body.suffix:
        return Infill(before=prompt, after=body.suffix)
    return Text(prompt, body.parse_special is not False, body.add_special_tokens)


def _opening(body: CompletionRequest, answer: Answer, choice: Choice) -> Json | None:
    echo = "" if body.echoes_logprobs else _echo(body, answer, choice.index)
    return {"index": choice.index, "logprobs": None, "finish_reason": None, "text": echo} if echo else None


def _text(body: CompletionRequest, answer: Answer, piece: Piece) -> Json:
    echo = _echo(body, answer, piece.prompt.choice) if piece.prompt is not None else ""  # with its logprobs
    return {"text": echo + piece.text, "logprobs": _logprobs(body, answer, piece)}


def _whole_text(body: CompletionRequest, answer: Answer, index: int, piece: Piece) -> Json:
    text: Json = {"text": _echo(body, answer, index) + piece.text, "logprobs": _logprobs(body, answer, piece)}
    if piece.prompt is not None and body.prompt_logprobs is not None:
        text["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, piece.prompt)
    return text


def _echo(body: CompletionRequest, answer: Answer, index: int) -> str:
    """The text of a choice's prompt, for `echo`."""
    if not body.echo:
        return ""
    prompt = body.prompts[index // answer.choices_per_prompt]
    return prompt if isinstance(prompt, str) else answer.tokenizer.decode(prompt, skip_special_tokens=False)


def _logprobs(body: CompletionRequest, answer: Answer, piece: Piece) -> Json | None:
    if body.logprobs is None:
        return None
    echoed = piece.prompt if body.echoes_logprobs else None
    return completion_logprobs(
        answer.tokenizer,
        piece.token_ids,
        piece.logprobs,
        offset=piece.offset,
        as_ids=body.return_tokens_as_token_ids,
        prompt=echoed,
    )
