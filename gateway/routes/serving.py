"""The paths of all dialects: read the body, start the answer through the door, watch the connection, write streams."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from common.errors import ServingError
from gateway.answers.answer import Answer, Delivery
from gateway.answers.ask import Ask
from gateway.answers.choice import Choice, Piece
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked, Call, Dialect, Events, Memory, View
from gateway.dialects.table import DialectTable, Entry, recognised
from gateway.http.api import ApiPart
from gateway.http.application import Handler, Routes, told_path
from gateway.http.body import BodyLimits, checked, read_body, read_fields
from gateway.http.exchange import (
    CLIENT_LEFT,
    LEFT,
    BodyWriter,
    ClientLeftError,
    disconnected,
    fields_of,
    request_scope,
    unless_gone,
)
from gateway.http.fields import ignored_header
from gateway.http.problem import INTERNAL, Problem, answer_of, problem_of
from gateway.http.streaming import EVENTS, WrittenStream, event, named_event
from gateway.observe.metrics import AnswerMetrics, GatewayMetrics
from gateway.routes.door import Begun, Door, Loading, Told
from gateway.routes.loading import LoadingStream

log = logging.getLogger("baton.http")

IDLE_EVENT_S = 10.0  # idle time before an event, up to twice this


class StreamedAnswer:
    """A reader of an answer for its client. While the client doesn't read, tokens stay in the mailbox as numbers."""

    __slots__ = (
        "_answer",
        "_delivery",
        "_events",
        "_idle_event",
        "_is_quiet",
        "_keep",
        "_metrics",
        "_parts",
        "_timer",
        "_waiting",
        "_writer",
        "takes_text",
    )

    def __init__(
        self,
        events: Events,
        answer: Answer,
        metrics: AnswerMetrics,
        idle_event: bytes = b"",
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`keep` is called after all tokens, and awaited before the end."""
        self._keep = keep
        self._answer = answer
        self._metrics = metrics
        self._events = events
        self.takes_text = self._events.tell_text_alone
        self._parts = [self._events.opening()]
        self._writer: BodyWriter | None = None
        self._delivery: Delivery | None = None
        self._waiting: asyncio.Task[None] | None = None  # waits for a slow client
        self._idle_event = idle_event
        self._is_quiet = False  # nothing was written since the timer was set
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, writer: BodyWriter) -> None:
        """Write the stream's opening, and then each token as it comes."""
        self._writer = writer
        self.pause()
        if self._idle_event:
            self._watch()
        self._delivery = self._answer.deliver(self)

    def close(self) -> None:
        """Release the answer: the connection is done with it."""
        self._stop_watching()
        if self._delivery is not None:
            self._delivery.stop()
        if self._waiting is not None:
            self._waiting.cancel()
        self._answer.cancel(LEFT)
        self._metrics.ended()  # no-op if it was counted already

    # -- as the delivery's reader --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._waiting is None

    def say(self, choice: Choice, text: str, token_ids: Sequence[int]) -> None:
        self._metrics.went_on(choice)
        self._metrics.sending()
        self._parts.append(self._events.text(choice, text))

    def take(self, choice: Choice, piece: Piece) -> None:
        self._metrics.took(choice, piece)
        data = self._events.event(choice, piece)
        if data:
            self._metrics.sending()
            self._parts.append(data)

    def pause(self) -> None:
        writer, parts = self._writer, self._parts
        assert writer is not None
        if parts:
            self._is_quiet = False
            writer.write(parts[0] if len(parts) == 1 else b"".join(parts))
            parts.clear()
            if not writer.is_read:
                self._waiting = asyncio.create_task(self._until_read(writer))

    def ended(self, error: Exception | None) -> None:
        self._stop_watching()
        if error is None and self._keep is not None:
            self._waiting = asyncio.create_task(self._end_kept(self._keep))
        else:
            self._write_end(error)

    async def _end_kept(self, keep: Callable[[], Awaitable[None]]) -> None:
        """Store the answer before its end is sent: its client may refer to it at once."""
        try:
            await keep()
        except Exception as error:
            self._write_end(error)
        else:
            self._write_end(None)

    def _write_end(self, error: Exception | None) -> None:
        assert self._writer is not None
        self._parts.append(self._end(error))
        self._writer.end(b"".join(self._parts))

    def _end(self, error: Exception | None) -> bytes:
        """Write the end; an error becomes an event."""
        if error is None:
            self._metrics.ended()
            return self._events.closing()
        if isinstance(error, ServingError):
            self._metrics.failed(error.code)
            log.warning("http.stream_failed", extra={"answer": self._answer.id, "code": error.code})
            return self._events.failed(problem_of(error))
        self._metrics.failed(INTERNAL.code)
        log.error("http.stream_crashed", extra={"answer": self._answer.id}, exc_info=error)
        return self._events.failed(INTERNAL)

    def _watch(self) -> None:
        """Write idle events, where a client or proxy would take silence for an end."""
        assert self._writer is not None
        if self._is_quiet and self.is_ready:
            self._writer.write(self._idle_event)
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(IDLE_EVENT_S, self._watch)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _until_read(self, writer: BodyWriter) -> None:
        await writer.read()
        self._waiting = None
        if self._delivery is not None:
            self._delivery.wake()


class ServingRoutes:
    """The endpoints, calls and views of all dialects."""

    def __init__(
        self,
        dialects: DialectTable,
        answers: Answers,
        door: Door,
        metrics: GatewayMetrics,
        body_limits: BodyLimits,
        memories: Mapping[str, Memory[Any]],
    ) -> None:
        """`memories`: path -> memory of its endpoint."""
        self._door = door
        self._answers = answers
        self._metrics = metrics
        self._body_limits = body_limits
        self._turns = Turns()
        self._ignores_unknown = dialects.ignores_unknown
        generating = {
            path: partial(self._generate, entry, memories.get(path)) for path, entry in dialects.entries.items()
        }
        calls, deletes = dict[str, Handler](), dict[str, Handler]()
        for dialect in dialects.dialects:
            calls |= self._calls(dialect, dialect.paths.calls)
            deletes |= self._calls(dialect, dialect.paths.deletes)
        self.routes = Routes(
            gets={path: partial(self._show, views) for path, views in dialects.views.items()},
            posts=generating | calls,
            deletes=deletes,
            api=ApiPart.merged(dialect.api for dialect in dialects.dialects),
        )

    def _calls(self, dialect: Dialect, calls: Mapping[str, Call[Any]]) -> dict[str, Handler]:
        return {path: partial(self._call, dialect, told_path(path), call) for path, call in calls.items()}

    async def _show(self, views: Mapping[Dialect, View], request: Request) -> Response:
        dialect = recognised(tuple(views), fields_of(request.scope))
        return answer_of(views[dialect](self._answers, _asked(request)))

    async def _call(self, dialect: Dialect, path: str, call: Call[Any], request: Request) -> Response:
        self._metrics.asked(dialect.name, path)
        body = await read_fields(
            request,
            self._body_limits,
            call.body,
            default=b"{}",
            given=request.path_params,
            ignores_unknown=self._ignores_unknown,
        )
        return answer_of(await call.answer(body, self._answers, _asked(request)), headers=ignored_header(body))

    async def _generate(self, entry: Entry, memory: Memory[Any] | None, request: Request) -> Response:
        async def read() -> tuple[Any, Ask] | Told:
            raw = await read_body(request, self._body_limits)
            await self._turns.take()
            if memory is not None:
                return await self._recalled(entry, memory, raw, request)
            reading = partial(entry.read, given=request.path_params, headers=fields_of(request.scope))
            return await checked(raw, reading, self._body_limits)

        try:
            begun = await self._door.begin(
                entry,
                request_scope(request.scope),
                read,
                partial(unless_gone, request),
                tells_loading=entry.endpoint.stream_type == EVENTS,
            )
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        if isinstance(begun, Loading):
            refuse = partial(_refused_event, entry, request_scope(request.scope).request_id)
            stream: StreamedAnswer | LoadingStream = LoadingStream(begun, partial(_streamed, entry, memory), refuse)
            headers: Mapping[str, str] = {}
        elif isinstance(begun, Told):
            return answer_of(begun.content, headers=ignored_header(begun.body))
        elif not begun.ask.stream:
            return await _whole(request, _made(entry, memory, begun), begun)
        else:
            stream, headers = _streamed(entry, memory, begun), begun.headers
        return WrittenStream(
            media_type=entry.endpoint.stream_type,
            begin=stream.begin,
            close=stream.close,
            headers=headers,
            idle_event=entry.dialect.idle_event,
        )

    async def _recalled(
        self, entry: Entry, memory: Memory[Any], raw: bytes, request: Request
    ) -> tuple[Any, Ask] | Told:
        """A request's fields with references resolved, or an answer that needs no tokens. Raises ServingError."""
        given, headers = request.path_params, fields_of(request.scope)

        def parsed(raw: bytes) -> tuple[bytes, Any]:
            unpacked = entry.unpacked(raw, headers)
            return unpacked, entry.parse(unpacked, given)

        unpacked, body = await checked(raw, parsed, self._body_limits)
        found = await memory.recall(body, unpacked, _asked(request))
        return Told(body=body, content=found) if isinstance(found, Response) else found


def _streamed(entry: Entry, memory: Memory[Any] | None, begun: Begun) -> StreamedAnswer:
    events = entry.endpoint.events(begun.body, begun.answer)
    keep = None if memory is None else partial(memory.keep_streamed, begun.body, events)
    return StreamedAnswer(events, begun.answer, begun.metrics, entry.dialect.idle_event, keep)


def _refused_event(entry: Entry, request_id: str, problem: Problem) -> bytes:
    """The end of a stream whose answer could not start after its head was sent."""
    _, body = entry.dialect.error(problem, request_id)
    return event(body) if "type" not in body else named_event(body)


async def _made(entry: Entry, memory: Memory[Any] | None, begun: Begun) -> Any:
    told = await entry.endpoint.whole(begun.body, begun.answer)
    return told if memory is None else await memory.keep(begun.body, told)


async def _whole(request: Request, making: Coroutine[Any, Any, Any], begun: Begun) -> Response:
    """Wait for a whole answer. A client that disconnects cancels the work."""
    work = asyncio.create_task(making)
    gone = asyncio.create_task(disconnected(request))
    with begun.ending():
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.info("http.client_left", extra={"answer": begun.answer.id})
                return Response(status_code=CLIENT_LEFT)
            return answer_of(work.result(), headers=begun.headers)
        finally:
            gone.cancel()
            work.cancel()


def _asked(request: Request) -> Asked:
    scope = request_scope(request.scope)
    return Asked(
        parameters=request.path_params,
        query=request.query_params,
        headers=fields_of(request.scope),
        tenant=scope.tenant,
        request_id=scope.request_id,
    )


class Turns:
    """Lets one task a loop turn continue, so that streams are written in between."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # set in this turn of the loop

    async def take(self) -> None:
        """Return at once if nobody else did in this turn, else after earlier callers."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a cancelled waiter is skipped
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False
