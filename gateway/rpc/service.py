"""The methods of the gRPC service. Generating requests pass the same door as HTTP's, with the same bodies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf import json_format

from common.errors import ServingError, UnavailableError
from gateway.answers.ask import Ask
from gateway.answers.start import Answers
from gateway.dialects.kserve import DIALECT, objects
from gateway.dialects.kserve.dialect import NO_LOGGING, NO_SHARED_MEMORY, NO_TRACE
from gateway.dialects.kserve.infer import Infer, InferRequest
from gateway.dialects.kserve.outputs import Outputs, head
from gateway.dialects.kserve.wish import TEXT_OUTPUT, Wish
from gateway.dialects.loading import NO_LOADING
from gateway.dialects.table import Entry
from gateway.http.body import BodyLimits, checked
from gateway.http.exchange import RequestScope, Way
from gateway.http.problem import INTERNAL, Json, Problem, problem_of
from gateway.pooling.tensors import PooledTensors, pooled_request
from gateway.routes.door import Begun, Door
from gateway.rpc.messages import MESSAGES
from gateway.rpc.pieces import Pieces
from gateway.rpc.tensors import body_of, response_of

log = logging.getLogger("baton.rpc")

SERVICE = "inference.GRPCInferenceService"
MAX_AT_ONCE = 64  # concurrent answers of one stream
SHORTEST_S = 0.001
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND, 409: grpc.StatusCode.ABORTED, 429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE, 504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
_REFUSED = {
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), NO_LOADING),
    **{f"SystemSharedMemory{what}": NO_SHARED_MEMORY for what in ("Status", "Register", "Unregister")},
    **{f"CudaSharedMemory{what}": NO_SHARED_MEMORY for what in ("Status", "Register", "Unregister")},
    "TraceSetting": NO_TRACE,
    "LogSettings": NO_LOGGING,
}  # fmt: skip
OPEN = ("ServerLive", "ServerReady")  # no key is needed

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class View:
    """A method that only reads: request message, response message, and the response's fields."""

    request: str
    response: str
    show: Callable[[Answers, Any], Json]


def _of_model(show: Callable[[Answers, str, str | None], Json], answers: Answers, request: Any) -> Json:
    return show(answers, request.name, request.version)


def _readiness(show: Callable[[Answers, Any], Json], answers: Answers, request: Any) -> Json:
    """Answer a readiness query; not ready is no error."""
    try:
        return {"ready": show(answers, request)["ready"]}
    except UnavailableError:
        return {"ready": False}


_VIEWS = {
    "ServerLive": View("Nothing", "Live", lambda answers, request: objects.live(answers)),
    "ServerReady": View("Nothing", "Ready", partial(_readiness, lambda answers, request: objects.ready(answers))),
    "ModelReady": View("Model", "Ready", partial(_readiness, partial(_of_model, objects.model_ready))),
    "ServerMetadata": View("Nothing", "Server", lambda answers, request: objects.server(answers)),
    "ModelMetadata": View("Model", "ModelMetadata", partial(_of_model, objects.metadata)),
    "ModelConfig": View(
        "Model", "ModelConfig", lambda answers, request: {"config": _of_model(objects.config, answers, request)}
    ),
    "ModelStatistics": View("Model", "Statistics", partial(_of_model, objects.statistics)),
    "RepositoryIndex": View(
        "IndexRequest", "Index", lambda answers, request: {"models": objects.index(answers, only_ready=request.ready)}
    ),
}


class InferenceService:
    """All methods, for `grpc.aio`."""

    def __init__(
        self, door: Door, limits: BodyLimits, *, ignores_unknown: bool = False, pooled: PooledTensors | None = None
    ) -> None:
        """`pooled`: answers for models that pool."""
        self._door, self._pooled = door, pooled
        self._limits = limits
        self._whole = _entry("ModelInfer", Infer(streams=False), ignores_unknown=ignores_unknown)
        self._streamed = _entry("ModelStreamInfer", Infer(streams=True), ignores_unknown=ignores_unknown)

    def handler(self) -> Any:
        """The handler to register at a server."""
        unary, infer = grpc.unary_unary_rpc_method_handler, MESSAGES["InferRequest"].FromString
        methods = {
            name: unary(
                partial(self._show, name, view),
                request_deserializer=MESSAGES[view.request].FromString,
                response_serializer=_serialized,
            )
            for name, view in _VIEWS.items()
        }
        methods |= {name: unary(partial(_refuse, why)) for name, why in _REFUSED.items()}
        methods["ModelInfer"] = unary(self.infer, request_deserializer=infer, response_serializer=_serialized)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self.stream_infer, request_deserializer=infer, response_serializer=_serialized
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _show(self, name: str, view: View, request: Any, context: Any) -> Any:
        try:
            if name not in OPEN:
                self._door.asker(f"{SERVICE}/{name}", _headers(context), DIALECT.key)
            return json_format.ParseDict(view.show(self._door.answers, request), MESSAGES[view.response]())
        except Exception as error:
            await _abort(context, error)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def infer(self, request: Any, context: Any) -> Any:
        """One whole answer."""
        try:
            if self._pooled is not None and self._pooled.pools(request.model_name):
                response, metadata = await self._rows(self._pooled, self._whole, request, context)
                context.set_trailing_metadata(metadata)
                return response
            with self._entered(self._whole, context) as scope:
                begun = await self._begin(self._whole, scope, request, context)
                context.set_trailing_metadata(_metadata(scope, begun.headers))
                with begun.ending():
                    return await _whole(begun)
        except Exception as error:
            await _abort(context, error)

    async def stream_infer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Answers to many requests, each whole or in pieces, some concurrently. An error ends its request only."""
        try:
            self._door.asker(self._streamed.path, _headers(context), DIALECT.key)
        except ServingError as error:
            await _abort(context, error)
        places, writing = asyncio.Semaphore(MAX_AT_ONCE), asyncio.Lock()

        async def write(response: Any) -> None:
            async with writing:
                await context.write(response)

        async def answer(request: Any) -> None:
            try:
                await self._answered(request, context, write)
            finally:
                places.release()

        async with asyncio.TaskGroup() as group:
            async for request in requests:
                await places.acquire()
                group.create_task(answer(request))

    async def _answered(self, request: Any, context: Any, write: Callable[[Any], Any]) -> None:
        """One of a stream's answers, or its error."""
        try:
            if self._pooled is not None and self._pooled.pools(request.model_name):
                rows, _ = await self._rows(self._pooled, self._streamed, request, context, is_final=True)
                await write(MESSAGES["StreamedResponse"](infer_response=rows))
                return
            with self._entered(self._streamed, context) as scope:
                begun = await self._begin(self._streamed, scope, request, context)
                with begun.ending():
                    async with aclosing(_responses(begun)) as responses:
                        async for response in responses:
                            await write(MESSAGES["StreamedResponse"](infer_response=response))
        except Exception as error:
            named = MESSAGES["InferResponse"](model_name=request.model_name, id=request.id)
            await write(MESSAGES["StreamedResponse"](error_message=_problem(error).message, infer_response=named))

    async def _rows(
        self, pooled: PooledTensors, entry: Entry, request: Any, context: Any, *, is_final: bool | None = None
    ) -> tuple[Any, Metadata]:
        """The response of a model that pools, and the call's metadata. Raises ServingError."""
        with self._entered(entry, context) as scope:
            body = await checked(body_of(request), pooled_request, self._limits)
            named, tensor, headers = await pooled.told(body, scope, entry.path)
            return response_of(named, [tensor], is_final=is_final), _metadata(scope, headers)

    @contextmanager
    def _entered(self, entry: Entry, context: Any) -> Iterator[RequestScope]:
        """Raises ServingError."""
        method = entry.path.rpartition("/")[2]
        way = Way(
            name=entry.path,
            operation=entry.endpoint.operation,
            attributes={"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method},
            status="rpc.grpc.status_code",
        )
        with self._door.enter(way, _headers(context), DIALECT.key) as scope:
            try:
                yield scope
            except ServingError as error:
                scope.status = _code(problem_of(error).status).value[0]
                raise

    async def _begin(self, entry: Entry, scope: RequestScope, request: Any, context: Any) -> Begun:
        """Start an answer, which ends by the call's deadline. Raises ServingError."""

        def read_body(raw: bytes) -> tuple[InferRequest, Ask]:
            body, ask = entry.read(raw)
            return body, ask if left_s is None else _within(ask, left_s)

        async def read() -> tuple[InferRequest, Ask]:
            return await checked(body_of(request), read_body, self._limits)

        left_s = context.time_remaining()
        begun = await self._door.begin(entry, scope, read)
        assert isinstance(begun, Begun), "a text is always generated"
        return begun


def _entry(method: str, endpoint: Infer, *, ignores_unknown: bool) -> Entry:
    return Entry(dialect=DIALECT, path=f"{SERVICE}/{method}", endpoint=endpoint, ignores_unknown=ignores_unknown)


def _within(ask: Ask, left_s: float) -> Ask:
    deadline_s = max(SHORTEST_S, min(left_s, ask.terms.deadline_s or left_s))
    return replace(ask, terms=replace(ask.terms, deadline_s=deadline_s))


async def _whole(begun: Begun, *, is_final: bool | None = None) -> Any:
    """A whole answer as one response. Raises ServingError."""
    wish, answer = begun.body.wish, begun.answer
    outputs = Outputs(wish, answer, includes_input=wish.includes_input is not False)
    tensors = outputs.of(dict(enumerate(await answer.whole())))
    return response_of(head(answer, begun.body.id), tensors, is_final=is_final)


async def _responses(begun: Begun) -> AsyncGenerator[Any, None]:
    """The responses to one request of a stream; the last one is marked. Raises the error that ended the answer."""
    wish = begun.body.wish
    if begun.ask.stream:
        async with aclosing(_parts(begun, wish)) as parts:
            async for response in parts:
                yield response
    else:
        yield await _whole(begun, is_final=not wish.ends_empty)
    if wish.ends_empty:
        yield response_of(head(begun.answer, begun.body.id), (), is_final=True)


async def _parts(begun: Begun, wish: Wish) -> AsyncGenerator[Any, None]:
    """A response for each turn with new pieces."""
    answer, named = begun.answer, head(begun.answer, begun.body.id)
    outputs, num_open = Outputs(wish, answer), len(answer.choices)
    async with aclosing(Pieces(begun).turns()) as turns:
        async for pieces in turns:
            num_open -= sum(bool(piece.finish) for piece in pieces.values())
            is_last = not num_open and not wish.ends_empty
            if is_last or wish.outputs != (TEXT_OUTPUT,) or any(piece.text for piece in pieces.values()):
                yield response_of(named, outputs.of(pieces), is_final=is_last)


# -- what gRPC has for headers and statuses -----------------------------------------------------------------------------


def _headers(context: Any) -> dict[str, str]:
    """The call's text metadata; the first one of duplicates."""
    return {name: value for name, value in reversed(context.invocation_metadata() or ()) if isinstance(value, str)}


def _metadata(scope: RequestScope, headers: Mapping[str, str]) -> Metadata:
    return tuple(({"x-request-id": scope.request_id} | dict(headers)).items())


def _code(status: int) -> Any:
    """The gRPC code of an HTTP status."""
    return _CODES.get(status, grpc.StatusCode.INTERNAL)


def _problem(error: Exception) -> Problem:
    """Return the problem for the client; details of a crash are only logged."""
    if isinstance(error, ServingError):
        return problem_of(error)
    log.error("rpc.crash", exc_info=error)
    return INTERNAL


async def _abort(context: Any, error: Exception) -> NoReturn:
    """End the call. Raises grpc's own exception."""
    problem = _problem(error)
    await context.abort(_code(problem.status), problem.message, tuple(problem.headers.items()))
    raise AssertionError("a call goes on behind its end")


async def _refuse(why: str, request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())
