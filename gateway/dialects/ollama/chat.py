"""POST /api/chat."""

from __future__ import annotations

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Conversation, Reply
from gateway.dialects.dialect import Events
from gateway.dialects.ollama import asking, lines
from gateway.dialects.ollama.bodies import OllamaChatRequest
from gateway.dialects.ollama.messages import template_input
from gateway.http.problem import Json


class Chat:
    """Messages in, a message out. Without messages the model is loaded: a no-op."""

    body = OllamaChatRequest
    operation = "chat"
    stream_type = lines.LINES
    is_batchable = False

    def ask(self, body: OllamaChatRequest) -> Ask:
        conversation = Conversation(
            messages=template_input(body.messages), tools=body.tool_rules.tools, variables=body.variables
        )
        return asking.asked(
            body,
            answer_prefix="chat-",
            prompt=conversation,
            prompt_name="messages",
            reply=Reply(tools=body.tool_rules, may_think=body.think is not False),
            instead=None if body.messages else _message("", "", []),
        )

    def events(self, body: OllamaChatRequest, answer: Answer) -> Events:
        return lines.Lines(answer, _message, logprobs=body.logprobs, end=dict)

    async def whole(self, body: OllamaChatRequest, answer: Answer) -> Json:
        return await lines.whole(answer, _message, logprobs=body.logprobs, end=lambda _: {})

    def describe(self, body: OllamaChatRequest) -> Attributes:
        return asking.described(body)


def _message(text: str, reasoning: str, calls: list[Json]) -> Json:
    more = ({"thinking": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
    return {"message": {"role": "assistant", "content": text} | more}
