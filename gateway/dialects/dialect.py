"""A dialect: an HTTP API for answers, a folder here and an entry of `DIALECTS`."""

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
from gateway.http.problem import Json, Problem
from gateway.tenants.tenants import BEARER, KeyForm, Tenant

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The context of a body: path parameters and headers."""

    parameters: Mapping[str, str]  # from the path
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by their names in lower case
    tenant: Tenant
    request_id: str


# The answer to a GET: see `gateway.http.problem.answer_of`. Raises ServingError.
View = Callable[[Answers, Asked], Any]


class Events(Protocol):
    """One streamed answer as bytes, piece by piece. Called as tokens arrive: it must not block."""

    def opening(self) -> bytes:
        """Return the bytes before any token; may be empty, as may all that follow."""
        ...

    @property
    def tell_text_alone(self) -> bool:
        """True if `text` may be called: only the text differs between events."""
        ...

    def text(self, choice: Choice, text: str) -> bytes:
        """The event of a text-only piece, reasoning if `choice.is_reasoning`."""
        ...

    def event(self, choice: Choice, piece: Piece) -> bytes:
        """Return a piece's event. It has one token, or all since the previous piece."""
        ...

    def closing(self) -> bytes:
        """The end of a successful stream."""
        ...

    def failed(self, problem: Problem) -> bytes:
        """The end of a stream that failed after its start."""
        ...


class Endpoint(Protocol[Body]):
    """A path that generates. It knows bodies and answers, but not placement, sockets, budgets or metrics."""

    @property
    def body(self) -> type[Body]:
        """The class that validates a body; its errors must suit `gateway.http.fields.parse_body`."""
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
        """True if a batch line may use it; its body then names the model in `model`."""
        ...

    def ask(self, body: Body) -> Ask:
        """Return the body's ask in neutral terms. Raises InvalidRequestError."""
        ...

    def events(self, body: Body, answer: Answer) -> Events:
        """The writer of a streamed answer's events."""
        ...

    async def whole(self, body: Body, answer: Answer) -> Any:
        """An unstreamed answer: see `gateway.http.problem.answer_of`. Raises ServingError."""
        ...

    def describe(self, body: Body) -> Attributes:
        """Attributes of the request's span."""
        ...


class Memory(Protocol[Body]):
    """The storage of an endpoint: contents that requests may refer to, and kept answers."""

    async def recall(self, body: Body, raw: bytes, asked: Asked) -> tuple[Body, Ask] | Response:
        """Resolve the references of a body, and parse it; or return an answer that needs no tokens. Raises ServingError."""
        ...

    async def keep(self, body: Body, told: Json) -> Json:
        """Store a whole answer before its client has it; return the answer to send. Raises ServingError."""
        ...

    async def keep_streamed(self, body: Body, events: Events) -> None:
        """Store a streamed answer before the stream ends. Raises ServingError."""
        ...


class Call(Protocol[Body]):
    """A path that answers a body without generating."""

    @property
    def body(self) -> type[Body]:
        """See `Endpoint.body`."""
        ...

    async def answer(self, body: Body, answers: Answers, asked: Asked) -> Any:
        """Return the answer: see `gateway.http.problem.answer_of`. Raises ServingError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DialectPaths:
    """The paths of a dialect, by method.

    A path may have parameters: `/v2/models/{model}/infer`, or `{model:path}` where slashes may be in one. Those of an endpoint or
    a call become fields of the body. The dialect also owns the paths below these and below `prefixes`: it writes their errors.
    """

    endpoints: Mapping[str, Endpoint[Any]] = field(default_factory=dict)  # path -> endpoint of its POST
    calls: Mapping[str, Call[Any]] = field(default_factory=dict)  # path -> call of its POST
    deletes: Mapping[str, Call[Any]] = field(default_factory=dict)  # path -> call of its DELETE
    views: Mapping[str, View] = field(default_factory=dict)  # path -> view of its GET
    open_paths: tuple[str, ...] = ()  # views without a key
    prefixes: tuple[str, ...] = ()

    @property
    def answered(self) -> tuple[str, ...]:
        return (*self.endpoints, *self.calls, *self.deletes, *self.views)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """An HTTP API: its paths, the place of clients' keys, and the form of errors.

    Where dialects own the same path, it goes to the first that `recognises` the request's headers, else to the one that has no
    such rule.
    """

    name: str
    api: ApiPart  # the OpenAPI part of its paths
    error: Callable[[Problem, str], tuple[int, Json]]  # status and body, for a request's id
    key: KeyForm = BEARER
    paths: DialectPaths
    recognises: Callable[[Mapping[str, str]], bool] | None = None  # by headers
    id_header: str = ""  # carries the request's id, in addition to x-request-id
    unpack: Callable[[bytes, Mapping[str, str]], bytes] | None = None  # converts a body to JSON, by the headers
    idle_event: bytes = b""  # keeps a silent stream alive
