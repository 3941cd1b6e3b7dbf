"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Conversation
from gateway.answers.choice import Choice, Piece
from gateway.dialects.openai import framing
from gateway.dialects.openai.objects import chat_logprobs, head, prompt_logprobs
from gateway.dialects.openai.schema import ChatRequest
from gateway.http.problem import Json
from gateway.http.streaming import EVENTS


class Chat:
    """Messages in, a message out."""

    body = ChatRequest
    operation = "chat"
    stream_type = EVENTS
    is_batchable = True
    stream_error = staticmethod(framing.stream_error)

    def ask(self, body: ChatRequest) -> Ask:
        conversation = Conversation(
            messages=[message.as_template_input() for message in body.messages],
            tools=body.tool_rules.tools,
            opens_answer=body.opens_answer,
            continues_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
            parse_special=bool(body.parse_special),
        )
        return framing.asked(
            body,
            answer_prefix="chatcmpl",
            prompts=[conversation],
            max_tokens=body.wanted_tokens,
            logprobs=body.num_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            field_names=None if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"},
        )

    def events(self, body: ChatRequest, answer: Answer) -> AsyncGenerator[bytes, None]:
        return framing.chunks(body, answer, head(answer, "chat.completion.chunk"), opening=_opening, content=_delta)

    async def whole(self, body: ChatRequest, answer: Answer) -> Json:
        whole = await framing.whole(body, answer, head(answer, "chat.completion"), _message)
        scored = [choice.pop("prompt_logprobs", None) for choice in whole["choices"]]
        return whole if body.prompt_logprobs is None else whole | {"prompt_logprobs": scored[0]}

    def describe(self, body: ChatRequest) -> Attributes:
        return framing.described(body, body.wanted_tokens)


def _opening(body: ChatRequest, answer: Answer, choice: Choice) -> Json:
    delta = {"role": "assistant", "content": "", "refusal": None}
    return {"index": choice.index, "logprobs": None, "finish_reason": None, "delta": delta}


def _delta(body: ChatRequest, answer: Answer, piece: Piece) -> Json:
    delta = {"content": piece.text} if piece.text or not piece.finish else {}
    return {"delta": delta, "logprobs": _logprobs(body, answer, piece)}


def _message(body: ChatRequest, answer: Answer, index: int, piece: Piece) -> Json:
    message = {"role": "assistant", "content": piece.text, "refusal": None}
    choice: Json = {"message": message, "logprobs": _logprobs(body, answer, piece)}
    if piece.prompt is not None:
        choice["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, piece.prompt)
    return choice


def _logprobs(body: ChatRequest, answer: Answer, piece: Piece) -> Json | None:
    if body.num_logprobs is None:
        return None
    as_ids = body.return_tokens_as_token_ids
    return chat_logprobs(answer.tokenizer, piece.token_ids, piece.logprobs, as_ids=as_ids)
