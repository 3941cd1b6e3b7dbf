"""POST /invocations: any body of vLLM's or TGI's container, answered in its own form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, RootModel, Tag, model_validator

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask
from gateway.dialects.dialect import Endpoint, Events
from gateway.dialects.openai.chat import Chat
from gateway.dialects.openai.completions import Completions
from gateway.dialects.openai.schema import ChatRequest, CompletionRequest
from gateway.dialects.tgi.bodies import TgiRequest
from gateway.dialects.tgi.generate import Generate
from gateway.http.fields import MAX_TOKEN_IDS
from gateway.http.streaming import EVENTS

KINDS = ("messages", "prompt", "inputs")


def _kind(body: Any) -> str | None:
    return next((name for name in KINDS if isinstance(body, dict) and body.get(name) is not None), None)


_Body = Annotated[
    Annotated[ChatRequest, Tag("messages")]
    | Annotated[CompletionRequest, Tag("prompt")]
    | Annotated[TgiRequest, Tag("inputs")],
    Discriminator(
        _kind,
        custom_error_type="no_kind",
        custom_error_message="one of messages, prompt and inputs says what is asked: send one of them",
    ),
]


class Invocation(RootModel[_Body]):
    """Body of POST /invocations: chat, completions or TGI. Without a `model` the default one answers."""

    many: ClassVar[Mapping[str, int]] = {"prompt": MAX_TOKEN_IDS}
    kind_depth: ClassVar[int] = 1  # error locations begin with the kind

    @model_validator(mode="before")
    @classmethod
    def _of_some_model(cls, body: Any) -> Any:
        return {"model": ""} | body if isinstance(body, dict) else body

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.root.ignored


_ENDPOINTS: dict[type, Endpoint[Any]] = {
    ChatRequest: Chat(),
    CompletionRequest: Completions(),
    TgiRequest: Generate(as_pipeline=True),
}


class Invocations:
    """The endpoint: each body is answered as at its own path."""

    body = Invocation
    operation = "generate_content"
    stream_type = EVENTS
    is_batchable = False

    def ask(self, body: Invocation) -> Ask:
        return _endpoint(body).ask(body.root)

    def events(self, body: Invocation, answer: Answer) -> Events:
        return _endpoint(body).events(body.root, answer)

    async def whole(self, body: Invocation, answer: Answer) -> Any:
        return await _endpoint(body).whole(body.root, answer)

    def describe(self, body: Invocation) -> Attributes:
        return _endpoint(body).describe(body.root)


def _endpoint(body: Invocation) -> Endpoint[Any]:
    return _ENDPOINTS[type(body.root)]
