"""The door of every request, over any transport: its id, tenant and trace, authorization, and counts.

The layers of HTTP do the first part for requests that HTTP carries (gateway/http/layers.py). `enter` does it for all others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.errors import RateLimitedError, ServingError
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask
from gateway.answers.start import Answers
from gateway.dialects.table import Entry
from gateway.http.fields import ignored_header
from gateway.http.problem import INTERNAL, REFUSALS, UnauthorizedError, problem_of
from gateway.http.request_scope import KeyForm, RequestScope, needed, request_id_of
from gateway.observe.metrics import AnswerMetrics, GatewayMetrics
from gateway.observe.spans import ServerSpans, Way, describe_answer
from gateway.request.refused import Refusals
from gateway.request.spec import Origin
from gateway.tenants.tenants import Tenant, Tenants

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
    def enter(self, way: Way, headers: Mapping[str, str], form: KeyForm) -> Iterator[RequestScope]:
        """Context manager around a request that is not HTTP. `headers`: its metadata, with lower-case names.

        Raises UnauthorizedError; traces and times what the request raises.
        """
        scope = RequestScope(request_id=request_id_of(headers))
        with self._spans.around(scope, headers, way):
            try:
                scope.tenant = self.asker(way.name, headers, form, request_id=scope.request_id)
                yield scope
            except ServingError as error:
                scope.problem = problem_of(error).status
                raise
            except Exception:
                scope.problem = INTERNAL.status
                raise
            finally:
                if scope.problem in REFUSALS:
                    self.metrics.told_refusal(time.monotonic() - scope.read_at, waited=scope.waited)

    def asker(self, way: str, headers: Mapping[str, str], form: KeyForm, *, request_id: str = "") -> Tenant:
        """Return the tenant of a request. Raises UnauthorizedError."""
        tenant = self._tenants.asking(form.read(headers))
        if tenant is None:
            self._told(request_id or request_id_of(headers), way)
            raise UnauthorizedError(needed("API key", form))
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
            origin = Origin(scope.tenant, scope.trace.context, scope.received_at)
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
