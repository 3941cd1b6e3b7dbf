"""The door of every request, over any transport: its id, tenant and trace, authorization, and counts.

`HttpDoor` and `KeyCheck` are its layers for requests that HTTP carries. `Door.enter` is for all others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import RateLimitedError, ServingError
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask
from gateway.answers.start import Answers
from gateway.dialects.table import DialectTable, Entry
from gateway.http.exchange import RequestScope, Way, fields_of, request_id_of, request_scope
from gateway.http.fields import ignored_header
from gateway.http.problem import INTERNAL, REFUSALS, UnauthorizedError, problem_of
from gateway.observe.metrics import AnswerMetrics, GatewayMetrics
from gateway.observe.spans import ServerSpans, describe_answer
from gateway.request.refused import Refusals
from gateway.request.spec import Origin
from gateway.tenants.tenants import ADMIN_PATHS, BEARER, OPERATOR_PATHS, KeyForm, Tenant, Tenants, is_under, needed

Start = Coroutine[Any, Any, Answer]


class ClientLeftError(Exception):
    """The client disconnected before its answer started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A started answer."""

    body: Any
    ask: Ask
    answer: Answer
    metrics: AnswerMetrics

    @property
    def headers(self) -> dict[str, str]:
        """The tenant's remaining budget, and the ignored fields."""
        return {**self.answer.headers, **ignored_header(self.body)}

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Context manager around reading the answer: its end is counted once, and abandoned work is cancelled."""
        try:
            yield
        except ServingError as error:
            self.metrics.failed(error.code)
            raise
        finally:
            self.answer.cancel("client disconnected")
            self.metrics.ended()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An answer without generation: see `Ask.instead` and `Memory.recall`."""

    body: Any
    content: Any


class Door:
    """The entrance of requests."""

    def __init__(
        self,
        answers: Answers,
        tenants: Tenants,
        metrics: GatewayMetrics,
        refusals: Refusals,
        spans: ServerSpans,
        *,
        told: Callable[[str, str], None],
    ) -> None:
        """`told` gets the id and transport of each request without a valid key."""
        self.answers = answers
        self._tenants = tenants
        self.metrics = metrics
        self.refusals = refusals
        self._spans = spans
        self._told = told

    @contextmanager
    def around(self, scope: RequestScope, headers: Mapping[str, str], way: Way | None) -> Iterator[None]:
        """Context manager around a request: its id, its span, the duration of a refusal. `way` None: it is not traced."""
        scope.request_id = request_id_of(headers)
        scope.session = headers.get("x-session-id", "")
        with nullcontext() if way is None else self._spans.around(scope, headers, way):
            try:
                yield
            finally:
                if scope.problem in REFUSALS:
                    self.metrics.told_refusal(time.monotonic() - scope.read_at, waited=scope.waited)

    @contextmanager
    def enter(self, way: Way, headers: Mapping[str, str], form: KeyForm) -> Iterator[RequestScope]:
        """Context manager around a request that is not HTTP. `headers`: its metadata, with lower-case names.

        Raises UnauthorizedError; traces and times what the request raises.
        """
        scope = RequestScope()
        with self.around(scope, headers, way):
            try:
                scope.tenant = self.asker(way.name, headers, form, request_id=scope.request_id)
                yield scope
            except ServingError as error:
                scope.problem = problem_of(error).status
                raise
            except Exception:
                scope.problem = INTERNAL.status
                raise

    def asker(
        self, path: str, headers: Mapping[str, str], form: KeyForm, *, request_id: str = "", is_open: bool = False
    ) -> Tenant:
        """Return the tenant of a request; of an open path, the default one. Raises UnauthorizedError."""
        if is_open:
            return self._tenants.default
        needs_admin = is_under(path, ADMIN_PATHS + OPERATOR_PATHS)
        form = BEARER if needs_admin else form
        tenant = self._tenants.asking(form.read(headers), path)
        if tenant is None:
            self._told(request_id or request_id_of(headers), path)
            kind = "admin key" if needs_admin else "API key"
            raise UnauthorizedError(needed(kind, form), challenge=form.challenge)
        return tenant

    async def begin(
        self,
        entry: Entry,
        scope: RequestScope,
        read: Callable[[], Awaitable[tuple[Any, Ask] | Told]],
        wait: Callable[[Start], Awaitable[Answer]] | None = None,
    ) -> Begun | Told:
        """Start the answer to the body and ask from `read`, unless it is known at once.

        `wait` awaits the start where the client's leaving doesn't cancel this task. Raises ServingError, or ClientLeftError if
        `wait` does; counts and keeps either.
        """
        model = ""
        self.metrics.asked(entry.dialect.name, entry.path)
        try:
            # Refuse a hopeless request before its body is read and tokenised.
            self.answers.generations.turn_away(scope.tenant, priority=scope.tenant.max_priority)
            found = await read()
            if isinstance(found, Told):
                return found
            body, ask = found
            model = self.answers.catalogue.own_name(ask.model)
            served = self.answers.check(ask, scope.tenant)
            if ask.instead is not None:
                return Told(body=body, content=ask.instead)
            origin = Origin(scope.tenant, scope.trace.context, scope.received_at, scope.session)
            start = self.answers.start(ask, origin, served)
            answer = await (start if wait is None else wait(start))
        except ServingError as error:
            self._refused(error, scope, model)
            raise
        except (ClientLeftError, asyncio.CancelledError):
            self.metrics.failed("client_left", model=model)
            raise
        if scope.trace.is_recorded:
            scope.trace.attributes |= entry.endpoint.describe(body)
            scope.trace.answered = partial(describe_answer, answer)
        answer.observer = metrics = AnswerMetrics(self.metrics, answer, scope.received_at)
        return Begun(body=body, ask=ask, answer=answer, metrics=metrics)

    def _refused(self, error: ServingError, scope: RequestScope, model: str) -> None:
        self.metrics.failed(error.code, model=model)
        self.refusals.add(
            error,
            request_id=scope.request_id,
            trace_id=scope.trace.context[3:35],
            asker=scope.tenant,
            model=model,
            at=scope.received_at,
        )
        if isinstance(error, RateLimitedError):
            self.metrics.refused(f"budget: {error.what}", model=model)


class HttpDoor:
    """The door's outer layer for HTTP: `Door.around` each request, and its id in the answer.

    It alone wraps `send`, so that a streamed token passes one function of ours; inner layers look at the status that it notes.
    """

    def __init__(self, app: ASGIApp, *, door: Door, table: DialectTable) -> None:
        self._app = app
        self._door = door
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = request_scope(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state.request_id
                if header := self._table.id_header(scope):
                    headers[header] = state.request_id
                for name, value in state.headers.items():
                    headers.append(name, value)
            await send(message)

        with self._door.around(state, fields_of(scope), self._table.way(scope)):
            await self._app(scope, receive, send_with_id)


class KeyCheck:
    """The door's inner layer for HTTP: finds the tenant of a request's key; refuses keys without access to the path."""

    def __init__(self, app: ASGIApp, *, door: Door, table: DialectTable) -> None:
        self._app = app
        self._door = door
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            state, path = request_scope(scope), scope["path"]
            form, is_open = self._table.key_form(scope), self._table.is_open(scope["method"], path)
            try:
                state.tenant = self._door.asker(
                    path, fields_of(scope), form, request_id=state.request_id, is_open=is_open
                )
            except UnauthorizedError as error:
                app = self._table.refusal(scope, problem_of(error))
        await app(scope, receive, send)
