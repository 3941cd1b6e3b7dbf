"""POST /v1/chat/completions."""

from __future__ import annotations

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Conversation, Reply
from gateway.answers.choice import Choice, Piece
from gateway.dialects.dialect import Events
from gateway.dialects.openai import framing
from gateway.dialects.openai.framing import chat_logprobs, head, prompt_logprobs
from gateway.dialects.openai.schema import ChatRequest
from gateway.http.problem import Json
from gateway.http.streaming import EVENTS
from gateway.parsing.parsed import CallDelta


class Chat:
    """Messages in, a message out."""

    operation = "chat"
    stream_type = EVENTS
    is_batchable = True

    def __init__(self, body: type[ChatRequest] = ChatRequest) -> None:
        self.body = body

    def ask(self, body: ChatRequest) -> Ask:
        conversation = Conversation(
            messages=[message.as_template_input() for message in body.messages],
            tools=body.tool_rules.tools,
            opens_answer=body.opens_answer,
            continues_final_message=body.continue_final_message,
            variables=body.template_variables,
            parse_special=bool(body.parse_special),
            adds_special=body.add_special_tokens,
        )
        return framing.asked(
            body,
            answer_prefix="chatcmpl-",
            prompts=[conversation],
            max_tokens=body.wanted_tokens,
            logprobs=body.num_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            reply=Reply(
                tools=body.tool_rules,
                shows_reasoning=body.include_reasoning,
                thinking_budget=body.reasoning_budget,
                is_steered=body.reasoning_control,
                may_think=body.may_think,
            ),
            field_names={"prompt": "messages"}
            | ({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}),
        )

    def events(self, body: ChatRequest, answer: Answer) -> Events:
        first, has_more = head(answer, "chat.completion.chunk"), body.num_logprobs is not None
        return framing.Chunks(body, answer, first, opening=_opening, content=_delta, has_more=has_more)

    async def whole(self, body: ChatRequest, answer: Answer) -> Json:
        whole = await framing.whole(body, answer, head(answer, "chat.completion"), _message)
        if body.prompt_logprobs is None:
            return whole
        return whole | {"prompt_logprobs": whole["choices"][0].pop("prompt_logprobs", None)}

    def describe(self, body: ChatRequest) -> Attributes:
        return framing.described(body, body.wanted_tokens)


def _opening(body: ChatRequest, answer: Answer, choice: Choice) -> Json:
    delta = {"role": "assistant", "content": "", "refusal": None}
    return {"index": choice.index, "logprobs": None, "finish_reason": None, "delta": delta}


def _delta(body: ChatRequest, answer: Answer, piece: Piece) -> Json:
    says_more = piece.reasoning or piece.calls
    delta: Json = {"content": piece.text} if piece.text or not (piece.finish or says_more) else {}
    delta |= _reasoning(piece)
    if piece.calls and body.calls_functions:
        delta["function_call"] = _function(piece.calls[0])
    elif piece.calls:
        delta["tool_calls"] = [{"index": call.index} | _call(call) for call in piece.calls]
    return {"delta": delta, "logprobs": _logprobs(body, answer, piece)}


def _message(body: ChatRequest, answer: Answer, index: int, piece: Piece) -> Json:
    content = None if piece.calls and not piece.text else piece.text
    message: Json = {"role": "assistant", "content": content, "refusal": None} | _reasoning(piece)
    if piece.calls and body.calls_functions:
        message["function_call"] = _function(piece.calls[0])
    elif piece.calls:
        message["tool_calls"] = [_call(call) for call in piece.calls]
    choice: Json = {"message": message, "logprobs": _logprobs(body, answer, piece)}
    if piece.prompt is not None and index == 0:  # all choices share the prompt
        choice["prompt_logprobs"] = prompt_logprobs(answer.tokenizer, piece.prompt)
    return choice


def _reasoning(piece: Piece) -> Json:
    """Reasoning under both names that servers use."""
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


def _call(call: CallDelta) -> Json:
    """A call, or a piece of one; only the first piece has id and name."""
    head: Json = {"id": call.id, "type": "function"} if call.name else {}
    return head | {"function": _function(call)}


def _function(call: CallDelta) -> Json:
    return ({"name": call.name} if call.name else {}) | {"arguments": call.arguments}


def _logprobs(body: ChatRequest, answer: Answer, piece: Piece) -> Json | None:
    if body.num_logprobs is None:
        return None
    as_ids = body.return_tokens_as_token_ids
    return chat_logprobs(answer.tokenizer, piece.token_ids, piece.logprobs, as_ids=as_ids)
