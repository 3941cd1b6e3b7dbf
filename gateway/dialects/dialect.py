"""A dialect: one way of asking for answers over HTTP, a folder here and an entry of `DIALECTS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask
from gateway.answers.choice import Choice, Piece
from gateway.answers.start import Answers
from gateway.http.api import ApiPart
from gateway.http.keys import KeyForm
from gateway.http.problem import Json, Problem

Body = TypeVar("Body", bound=BaseModel)
View = Callable[[Answers, Mapping[str, str]], Json]  # what a GET shows of the models, by the path's parameters


class Events(Protocol):
    """One streamed answer as bytes, piece by piece. Called where tokens arrive: it must not wait."""

    def opening(self) -> bytes:
        """What comes before any token; may be empty, as all that follows."""
        ...

    @property
    def tell_text_alone(self) -> bool:
        """Whether `text` may be called: nothing was asked for that may differ from event to event, but text."""
        ...

    def text(self, choice: Choice, text: str) -> bytes:
        """`event` of a piece that is text and nothing else, reasoning if `choice.is_reasoning`."""
        ...

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """What a piece adds. It has one token, or all that came since the piece before."""
        ...

    def closing(self) -> bytes:
        """The end of a stream that did not fail."""
        ...


class Endpoint(Protocol[Body]):
    """A path that generates. It knows bodies and answers, but not placement, sockets, budgets or metrics."""

    @property
    def body(self) -> type[Body]:
        """The class that checks a body; its errors must suit `gateway.http.fields.parse_body`."""
        ...

    @property
    def operation(self) -> str:
        """`gen_ai.operation.name` in traces, by GenAI's semantic conventions."""
        ...

    @property
    def stream_type(self) -> str:
        """The media type of a streamed answer."""
        ...

    @property
    def is_batchable(self) -> bool:
        """Whether a batch line may ask for it; its body then names the model in `model`."""
        ...

    def ask(self, body: Body) -> Ask:
        """What the body asks for, in no dialect's words. Raises InvalidRequestError."""
        ...

    def events(self, body: Body, answer: Answer) -> Events:
        """How a streamed answer is written."""
        ...

    async def whole(self, body: Body, answer: Answer) -> Json:
        """An answer that is not streamed. Raises ServingError."""
        ...

    def stream_error(self, problem: Problem) -> bytes:
        """The last bytes of a stream that failed after it began."""
        ...

    def describe(self, body: Body) -> Attributes:
        """Attributes of the request's span."""
        ...


class Dialect(Protocol):
    """Its paths, where its clients put their key, and how it writes errors."""

    @property
    def name(self) -> str: ...

    @property
    def endpoints(self) -> Mapping[str, Endpoint[Any]]:
        """Path -> what a POST there does."""
        ...

    @property
    def views(self) -> Mapping[str, View]:
        """Path -> what a GET there shows."""
        ...

    @property
    def key(self) -> KeyForm: ...

    @property
    def api(self) -> ApiPart:
        """The OpenAPI document's part about its paths."""
        ...

    def error(self, problem: Problem) -> tuple[int, Json]:
        """Status and body of an error, even if no endpoint was reached: 401, 404, 405, 413, 500."""
        ...
