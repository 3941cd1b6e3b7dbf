"""The door of every request, over any transport: its id, tenant and trace, authorization, and counts.

`HttpDoor` and `KeyCheck` are its layers for requests that HTTP carries. `Door.enter` is for all others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import DeadlineExceededError, RateLimitedError, ServingError, UnavailableError
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask
from gateway.answers.start import Answers
from gateway.dialects.table import DialectTable, Entry
from gateway.http.exchange import LEFT, ClientLeftError, RequestScope, Way, fields_of, request_id_of, request_scope
from gateway.http.fields import ignored_header
from gateway.http.problem import INTERNAL, REFUSALS, ForbiddenError, UnauthorizedError, problem_of
from gateway.observe.metrics import AnswerMetrics, GatewayMetrics
from gateway.observe.spans import ServerSpans, describe_answer
from gateway.request.refused import Refusals
from gateway.request.spec import NOT_ALLOWED, Origin
from gateway.tenants.shares import Asker
from gateway.tenants.tenants import ADMIN_PATHS, BEARER, OPERATOR_PATHS, KeyForm, Tenant, Tenants, is_under, needed

Start = Coroutine[Any, Any, Any]
Wait = Callable[[Start], Awaitable[Any]]  # awaits a start where the client's leaving doesn't cancel this task
SERVED_BY = "x-baton-model"
KEEP_ALIVE = "keep_alive"  # Ollama's field
LEAST_LEFT_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A started answer."""

    body: Any
    ask: Ask
    answer: Answer
    metrics: AnswerMetrics
    is_shared: bool = False  # several models answer to the name that was asked for
    is_hosted: bool = False  # its model is loaded and unloaded as it is asked for

    @property
    def headers(self) -> dict[str, str]:
        """The tenant's remaining budget, the ignored fields, and which of several models answers."""
        chosen = {SERVED_BY: self.answer.own_model} if self.is_shared else {}
        ignored = ignored_header(self.body, heeded=(KEEP_ALIVE,) if self.is_hosted else ())
        return {**self.answer.headers, **ignored, **chosen}

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Context manager around reading the answer: its end is counted once, and abandoned work is cancelled."""
        try:
            yield
        except ServingError as error:
            self.metrics.failed(error.code)
            raise
        finally:
            self.answer.cancel(LEFT)
            self.metrics.ended()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An answer without generation: see `Ask.instead` and `Memory.recall`."""

    body: Any
    content: Any


@dataclass(frozen=True, slots=True)
class Loading:
    """A streamed answer whose model has to be loaded first."""

    said: Callable[[], str]  # how far it is
    start: Callable[[], Coroutine[Any, Any, Begun | Told]]  # once it is


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
        scope.request_id, scope.fields = request_id_of(headers), headers
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
        wait: Wait | None = None,
        *,
        tells_loading: bool = False,
    ) -> Begun | Told | Loading:
        """Start the answer to the body and ask from `read`, unless it is known at once.

        `tells_loading`: a stream may begin before its model is loaded. Raises ServingError, or ClientLeftError if `wait` does;
        counts and keeps either.
        """
        self.metrics.asked(entry.dialect.name, entry.path)
        with self._counted(scope, ""):
            # Refuse a hopeless request before its body is read and tokenised.
            self.answers.generations.turn_away(scope.tenant, priority=scope.tenant.max_priority)
            found = await read()
        if isinstance(found, Told):
            return found
        ask, loads = found[1], self.answers.loads
        asker = Asker(scope.session or scope.request_id, scope.tenant.name, scope.fields)
        model = self.answers.catalogue.choose(ask.model, asker)
        may_tell = tells_loading and ask.stream and ask.instead is None and scope.tenant.may_load(model)
        if may_tell and loads is not None and loads.heard and loads.must_load(model):
            return Loading(partial(loads.said, model), partial(self._start, entry, scope, found, model))
        return await self._start(entry, scope, found, model, wait)

    async def _start(
        self, entry: Entry, scope: RequestScope, found: tuple[Any, Ask], model: str, wait: Wait | None = None
    ) -> Begun | Told:
        """Start an answer by the chosen model. Raises as `begin`."""
        body, ask = found
        since = time.monotonic()
        with self._counted(scope, model):
            is_hosted = await self._loaded(ask, model, scope.tenant, wait)
            if ask.instead is not None:
                self.answers.find(ask.model, model)
                return Told(body=body, content=ask.instead)
            if is_hosted:
                ask = self._later(ask, time.monotonic() - since)
            try:
                served = self.answers.check(ask, scope.tenant, model)
                origin = Origin(scope.tenant, scope.trace.context, scope.received_at, scope.session)
                start = self.answers.start(ask, origin, served)
                answer = await (start if wait is None else wait(start))
            except UnavailableError:
                if not is_hosted or self.answers.loads is None or not self.answers.loads.must_load(model):
                    raise
                answer = None  # its workers died meanwhile
        if answer is None:
            left = self._later(found[1], time.monotonic() - since)
            return await self._start(entry, scope, (body, left), model, wait)
        if scope.trace.is_recorded:
            scope.trace.attributes |= entry.endpoint.describe(body)
            scope.trace.answered = partial(describe_answer, answer)
        answer.observer = metrics = AnswerMetrics(self.metrics, answer, scope.received_at)
        alias = self.answers.catalogue.shared_alias(ask.model)
        if alias:
            self.metrics.shared(alias, answer.own_model)
        return Begun(body=body, ask=ask, answer=answer, metrics=metrics, is_shared=bool(alias), is_hosted=is_hosted)

    async def _loaded(self, ask: Ask, model: str, tenant: Tenant, wait: Wait | None) -> bool:
        """Have a model loaded that hosts offer, or unloaded, if that is all that is asked for; False: they don't.

        Raises ServingError.
        """
        loads, keep_s = self.answers.loads, ask.terms.model_keep_s
        if loads is None or not loads.heard or loads.find(model) is None:
            return False
        unloads = ask.instead is not None and keep_s == 0
        if (unloads or loads.must_load(model)) and not tenant.may_load(model):
            raise ForbiddenError(NOT_ALLOWED.format(model=model), param=ask.name_of("model"))
        if unloads:
            await loads.unload(model)
            return True
        deadline_s = ask.terms.first_token_s or self.answers.deadline_s(ask.terms)
        loading = loads.load(model, keep_s)
        try:
            async with asyncio.timeout(deadline_s):
                await (loading if wait is None else wait(loading))
                return True
        except TimeoutError:
            raise DeadlineExceededError(f"the deadline passed before model {model!r} was loaded") from None

    def _later(self, ask: Ask, waited_s: float) -> Ask:
        """The ask with what is left of its times: the wait for its model was part of them."""
        terms = ask.terms
        left_s = [
            None if whole_s is None else max(LEAST_LEFT_S, whole_s - waited_s)
            for whole_s in (self.answers.deadline_s(terms), terms.first_token_s)
        ]
        return replace(ask, terms=replace(terms, deadline_s=left_s[0], first_token_s=left_s[1]))

    @contextmanager
    def _counted(self, scope: RequestScope, model: str) -> Iterator[None]:
        """Context manager that counts and keeps the reason why an answer does not start."""
        try:
            yield
        except ServingError as error:
            self._refused(error, scope, model)
            raise
        except (ClientLeftError, asyncio.CancelledError):
            self.metrics.failed("client_left", model=model)
            raise

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
