"""POST /v1/messages, and the count of its prompt's tokens."""

from __future__ import annotations

from common.messages import SamplingParams
from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Constraint, ContextFit, DraftWish, Reply, Sampling, Terms, TextRules
from gateway.answers.start import Answers
from gateway.answers.tokenising import COUNTED_CONTEXTS
from gateway.dialects.anthropic.events import MessageEvents
from gateway.dialects.anthropic.objects import content_blocks, message_object, stop_of
from gateway.dialects.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.dialects.described import described
from gateway.dialects.dialect import Asked, Events
from gateway.http.problem import Json
from gateway.http.streaming import EVENTS

_SAMPLED = ("temperature", "top_p", "top_k")


class Messages:
    """Messages in, a message out."""

    body = MessagesRequest
    operation = "chat"
    stream_type = EVENTS
    is_batchable = True

    def ask(self, body: MessagesRequest) -> Ask:
        given = {name: value for name in _SAMPLED if (value := getattr(body, name)) is not None}
        return Ask(
            model=body.model,
            answer_prefix="msg_",
            prompts=[body.conversation],
            stream=body.stream,
            sampling=Sampling(
                params=SamplingParams(**given, max_tokens=body.max_tokens),
                left_open=frozenset(_SAMPLED) - given.keys(),
                drafts=DraftWish.of(body.speculation),
            ),
            fit=ContextFit(ends_with_context=True),
            text=TextRules(stops=body.stop_sequences or (), is_wanted=body.max_tokens > 0),
            constraint=Constraint(grammar=body.followed),
            reply=Reply(
                tools=body.tool_rules,
                shows_reasoning=body.shows_thinking,
                thinking_budget=body.thinking_budget,
                may_think=body.may_think,
            ),
            terms=Terms(keep=body.keep),
            field_names={"prompt": "messages"},
        )

    def events(self, body: MessagesRequest, answer: Answer) -> Events:
        return MessageEvents(answer, body.max_tokens)

    async def whole(self, body: MessagesRequest, answer: Answer) -> Json:
        (piece,) = await answer.whole()
        stop = stop_of(answer, piece.finish, body.max_tokens, has_calls=piece.has_calls)
        return message_object(answer, content_blocks(answer, piece), stop)

    def describe(self, body: MessagesRequest) -> Attributes:
        return described(
            model=body.model,
            stream=body.stream,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
        )


class CountTokens:
    """Token count of a request's prompt."""

    body = CountTokensRequest

    async def answer(self, body: CountTokensRequest, answers: Answers, asked: Asked) -> Json:
        served = answers.find(body.model)
        tokens = await answers.tokenising.tokens(body.conversation, served, name="messages", contexts=COUNTED_CONTEXTS)
        return {"input_tokens": len(tokens)}
