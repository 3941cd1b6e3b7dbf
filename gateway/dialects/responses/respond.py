"""POST /v1/responses and /v1/responses/compact: items in, items out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from common.messages import TokenLogprobs
from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, ContextFit, Conversation, Reply
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects.dialect import Events
from gateway.dialects.openai import framing
from gateway.dialects.openai.framing import chat_logprobs
from gateway.dialects.responses.events import Making, ResponseEvents
from gateway.dialects.responses.history import NOT_KEPT
from gateway.dialects.responses.items import Turns
from gateway.dialects.responses.objects import ID_PREFIX, usage_object
from gateway.dialects.responses.output import OutputRules
from gateway.dialects.responses.schema import CompactRequest, ResponseRequest
from gateway.http.problem import Json, NotKeptError
from gateway.http.streaming import EVENTS

FITS = -1  # see `ContextFit.longest_prompt`
SHORTEN = (
    "The conversation grows too long. Write what a colleague needs who goes on with it and sees nothing of it but this:"
    " what was asked for, what was decided and done, what was found (names, paths, values), and what is left to do."
    " Write nothing else."
)


def conversation_of(body: ResponseRequest) -> Conversation:
    """The prompt. Raises NotKeptError for a reference to a missing item."""
    turns = Turns()
    if body.instructions:
        turns.say("system", body.instructions)
    for item in body.input:
        item.tell(turns)
    if body.compacts:
        turns.say("user", SHORTEN)
    return Conversation(
        messages=turns.messages,
        tools=body.called.rules.tools,
        variables=body.template_variables,
        parse_special=bool(body.parse_special),
    )


def _asked(body: ResponseRequest) -> Ask:
    """Raises InvalidRequestError."""
    rules = body.called.rules
    asked = framing.asked(
        body,
        answer_prefix=ID_PREFIX,
        prompts=[conversation_of(body)],
        max_tokens=body.max_output_tokens,
        logprobs=body.num_logprobs,
        reply=Reply(tools=rules, thinking_budget=body.reasoning_budget, may_think=body.may_think),
        field_names={"prompt": "input", "max_tokens": "max_output_tokens"},
    )
    return replace(asked, fit=ContextFit(longest_prompt=FITS)) if body.truncation == "auto" else asked


def rules_of(body: ResponseRequest, tokenizer: ChatTokenizer) -> OutputRules:
    """The rules for the output."""
    return OutputRules(
        called=body.called.called,
        summarises=body.summarises,
        seals="reasoning.encrypted_content" in (body.include or ()),
        compacts=body.compacts,
        logprobs=None if body.num_logprobs is None else partial(_logprobs, tokenizer),
    )


def _logprobs(tokenizer: ChatTokenizer, ids: Sequence[int], scores: Sequence[TokenLogprobs]) -> list[Json]:
    """Logprobs of tokens that may be text."""
    told: list[Json] = chat_logprobs(tokenizer, ids, scores, as_ids=False)["content"]
    return [one for token_id, one in zip(ids, told, strict=False) if token_id not in tokenizer.special_ids]


class Respond:
    """Items in, a response out."""

    body = ResponseRequest
    operation = "chat"
    stream_type = EVENTS
    is_batchable = True

    def ask(self, body: ResponseRequest) -> Ask:
        check_kept(body)
        return _asked(body)

    def events(self, body: ResponseRequest, answer: Answer) -> Events:
        return ResponseEvents(
            self._making(body, answer), tells_logprobs=body.num_logprobs is not None, was_queued=bool(body.background)
        )

    async def whole(self, body: ResponseRequest, answer: Answer) -> Json:
        making = self._making(body, answer)
        await answer.whole(making.took)
        return making.ended()

    def describe(self, body: ResponseRequest) -> Attributes:
        return framing.described(body, body.max_output_tokens)

    def _making(self, body: ResponseRequest, answer: Answer) -> Making:
        return Making(answer, body.echoed, rules_of(body, answer.tokenizer))


def check_kept(body: ResponseRequest) -> None:
    """Check a request for features that need a store of responses. Raises NotKeptError."""
    if body.history is not NOT_KEPT:
        return
    for name, value in (("previous_response_id", body.previous_response_id), ("conversation", body.conversation)):
        if value is not None:
            raise NotKeptError(f"{name}: responses are not kept here: send the whole conversation in input", param=name)
    if body.background:
        raise NotKeptError("background: responses are not kept here: leave it out", param="background")


class Compact:
    """A conversation in, its compaction out: summarised by the model itself, as a compaction item after the users' messages."""

    body = CompactRequest
    operation = "chat"
    stream_type = EVENTS
    is_batchable = False

    def ask(self, body: CompactRequest) -> Ask:
        check_kept(body.request)
        return _asked(body.request)

    def events(self, body: CompactRequest, answer: Answer) -> Events:
        return ResponseEvents(self._making(body, answer), tells_logprobs=False)

    async def whole(self, body: CompactRequest, answer: Answer) -> Json:
        making = self._making(body, answer)
        await answer.whole(making.took)
        return {
            "id": answer.id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*body.kept(answer.id), *making.output.items()],
            "usage": usage_object(answer.usage()),
        }

    def describe(self, body: CompactRequest) -> Attributes:
        return framing.described(body.request, None)

    def _making(self, body: CompactRequest, answer: Answer) -> Making:
        return Making(answer, body.request.echoed, rules_of(body.request, answer.tokenizer))
