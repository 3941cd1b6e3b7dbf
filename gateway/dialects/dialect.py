"""A dialect: one way of asking for answers over HTTP, a folder here and an entry of `DIALECTS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask
from gateway.answers.choice import Choice, Piece
from gateway.answers.start import Answers
from gateway.http.api import ApiPart
from gateway.http.keys import BEARER, KeyForm
from gateway.http.problem import Json, Problem
from gateway.tenants.tenants import Tenant

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request beside its body."""

    parameters: Mapping[str, str]  # from the path
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by their names in lower case
    tenant: Tenant
    request_id: str


# A GET's answer: see `gateway.http.responses.answer_of`. Raises ServingError.
View = Callable[[Answers, Asked], Any]


class Events(Protocol):
    """One streamed answer as bytes, piece by piece. Called where tokens arrive: it must not wait."""

    def opening(self) -> bytes:
        """Return the bytes before any token; may be empty, as all that follows."""
        ...

    @property
    def tell_text_alone(self) -> bool:
        """Whether `text` may be called: nothing was asked for that may differ from event to event, but text."""
        ...

    def text(self, choice: Choice, text: str) -> bytes:
        """`event` of a piece that is text and nothing else, reasoning if `choice.is_reasoning`."""
        ...

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """Return a piece's addition. It has one token, or all that came since the piece before."""
        ...

    def closing(self) -> bytes:
        """The end of a stream that did not fail."""
        ...

    def failed(self, problem: Problem) -> bytes:
        """The end of a stream that failed after it began."""
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
        """Return the body's ask, in no dialect's words. Raises InvalidRequestError."""
        ...

    def events(self, body: Body, answer: Answer) -> Events:
        """How a streamed answer is written."""
        ...

    async def whole(self, body: Body, answer: Answer) -> Any:
        """An answer that is not streamed: see `gateway.http.responses.answer_of`. Raises ServingError."""
        ...

    def describe(self, body: Body) -> Attributes:
        """Attributes of the request's span."""
        ...


class Memory(Protocol[Body]):
    """The memory of an endpoint: what its requests may refer to, and where their answers are kept."""

    async def recall(self, body: Body, raw: bytes, asked: Asked) -> tuple[Body, Ask] | Response:
        """The body with what it refers to, and what it asks for; or an answer that needs no tokens. Raises ServingError."""
        ...

    async def keep(self, body: Body, told: Json) -> Json:
        """Keep a whole answer, before its client has it; return what to tell it. Raises ServingError."""
        ...

    async def keep_streamed(self, body: Body, events: Events) -> None:
        """Keep what a stream told, before it ends. Raises ServingError."""
        ...


class Call(Protocol[Body]):
    """A path that answers a body without generating."""

    @property
    def body(self) -> type[Body]:
        """See `Endpoint.body`."""
        ...

    async def answer(self, body: Body, answers: Answers, asked: Asked) -> Any:
        """Return the answer: see `gateway.http.responses.answer_of`. Raises ServingError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """Its paths, where its clients put their key, and how it writes errors.

    A path may have parameters: `/v2/models/{model}/infer`, or `{model:path}` where slashes may be in one. Those of an endpoint or
    a call become fields of the body. The dialect also owns the paths below its own and below `prefixes`: it writes their errors.
    Where dialects own the same path, it goes to the first that `recognises` the request's headers, else to the one that has no
    such rule.
    """

    name: str
    api: ApiPart  # the OpenAPI document's part about its paths
    error: Callable[[Problem, str], tuple[int, Json]]  # status and body, for a request's id
    key: KeyForm = BEARER
    endpoints: Mapping[str, Endpoint[Any]] = field(default_factory=dict)  # path -> what a POST there generates
    calls: Mapping[str, Call[Any]] = field(default_factory=dict)  # path -> what a POST there answers
    deletes: Mapping[str, Call[Any]] = field(default_factory=dict)  # path -> what a DELETE there does
    views: Mapping[str, View] = field(default_factory=dict)  # path -> what a GET there shows
    open_paths: tuple[str, ...] = ()  # views that ask for no key
    prefixes: tuple[str, ...] = ()
    recognises: Callable[[Mapping[str, str]], bool] | None = None  # by headers
    id_header: str = ""  # has the request's id, beside x-request-id
    unpack: Callable[[bytes, Mapping[str, str]], bytes] | None = None  # an endpoint's body as JSON, by the headers
    idle_event: bytes = b""  # says in a silent stream that nothing comes yet

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.endpoints, *self.calls, *self.deletes, *self.views)
