"""Requests that generate, in any dialect: read the body, start the answer, watch the connection, count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from fastapi import Request, Response

from common.errors import RateLimitedError, ServingError
from gateway.answers.answer import Answer
from gateway.answers.start import Answers, Origin
from gateway.dialects.dialect import Asked, Call, Dialect, View
from gateway.dialects.table import DialectTable, Entry, recognised
from gateway.http.api import ApiPart
from gateway.http.body import BodyLimits, checked, read_body, read_fields
from gateway.http.fields import ignored_header
from gateway.http.request_scope import fields_of, request_scope
from gateway.http.responses import answer_of
from gateway.http.routing import Handler, Routes, told_path
from gateway.http.streaming import WrittenStream, disconnected
from gateway.observe.metrics import AnswerMetrics, GatewayMetrics
from gateway.observe.spans import describe_answer
from gateway.request.refused import Refusals
from gateway.routes.streamed import StreamedAnswer
from gateway.routes.turns import Turns

log = logging.getLogger("baton.http")

WATCH_AFTER_S = 0.02  # most answers have started by then
CLIENT_LEFT = 499  # nobody reads this answer


class ServingRoutes:
    """The endpoints, calls and views of all dialects."""

    def __init__(
        self,
        dialects: DialectTable,
        answers: Answers,
        metrics: GatewayMetrics,
        body_limits: BodyLimits,
        refusals: Refusals,
    ) -> None:
        self._refusals = refusals
        self._answers = answers
        self._metrics = metrics
        self._body_limits = body_limits
        self._turns = Turns()
        self._ignores_unknown = dialects.ignores_unknown
        generating = {path: partial(self._generate, entry) for path, entry in dialects.entries.items()}
        calls, deletes = dict[str, Handler](), dict[str, Handler]()
        for dialect in dialects.dialects:
            calls |= self._calls(dialect, dialect.calls)
            deletes |= self._calls(dialect, dialect.deletes)
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

    async def _generate(self, entry: Entry, request: Request) -> Response:
        endpoint, scope, model = entry.endpoint, request_scope(request.scope), ""
        self._metrics.asked(entry.dialect.name, entry.path)
        try:
            # Refuse a hopeless client before its body is read and tokenised.
            self._answers.generations.turn_away(scope.tenant, priority=scope.tenant.max_priority)
            raw = await read_body(request, self._body_limits)
            await self._turns.take()
            read = partial(entry.read, given=request.path_params, headers=fields_of(request.scope))
            body, ask = await checked(raw, read, self._body_limits)
            model = self._answers.catalogue.own_name(ask.model)
            served = self._answers.check(ask, scope.tenant)
            if ask.instead is not None:
                return answer_of(ask.instead, headers=ignored_header(body))
            origin = Origin(scope.tenant, scope.trace.context, scope.received_at)
            answer = await self._unless_gone(request, self._answers.start(ask, origin, served))
        except ServingError as error:
            self._metrics.failed(error.code, model=model)
            self._refusals.add(
                error,
                request_id=scope.request_id,
                trace_id=scope.trace.context[3:35],
                asker=scope.tenant,
                model=model,
                at=scope.received_at,
            )
            if isinstance(error, RateLimitedError):
                self._metrics.refused(f"budget: {error.what}", model=model)
            raise
        if answer is None:
            self._metrics.failed("client_left", model=model)
            return Response(status_code=CLIENT_LEFT)
        if scope.trace.is_recorded:
            scope.trace.attributes |= endpoint.describe(body)
            scope.trace.answered = partial(describe_answer, answer)
        answer.observer = metrics = AnswerMetrics(self._metrics, answer, scope.received_at)
        headers = {**answer.headers, **ignored_header(body)}
        if ask.stream:
            idle_event = entry.dialect.idle_event
            stream = StreamedAnswer(endpoint.events(body, answer), answer, metrics, idle_event)
            return WrittenStream(
                media_type=endpoint.stream_type,
                begin=stream.begin,
                close=stream.close,
                headers=headers,
                idle_event=idle_event,
            )
        return await self._whole(request, endpoint.whole(body, answer), answer, metrics, headers)

    async def _unless_gone(self, request: Request, start: Coroutine[Any, Any, Answer]) -> Answer | None:
        """Start an answer, perhaps after a wait. None: the client hung up meanwhile."""
        asking, gone, is_gone = asyncio.current_task(), list[asyncio.Task[None]](), False
        assert asking is not None

        def look() -> None:
            gone.append(asyncio.create_task(disconnected(request)))
            gone[0].add_done_callback(leave)

        def leave(_: object) -> None:
            nonlocal is_gone
            if waits:
                is_gone = True
                asking.cancel()

        waits = True
        timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, look)
        try:
            return await start
        except asyncio.CancelledError:
            if not is_gone or asking.uncancel():
                raise
            return None
        finally:
            waits = False
            timer.cancel()
            for task in gone:
                task.cancel()

    async def _whole(
        self,
        request: Request,
        making: Coroutine[Any, Any, Any],
        answer: Answer,
        metrics: AnswerMetrics,
        headers: Mapping[str, str],
    ) -> Response:
        """An answer at its end. A client that hangs up before cancels the work."""
        work = asyncio.create_task(making)
        gone = asyncio.create_task(disconnected(request))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.info("http.client_left", extra={"answer": answer.id})
                return Response(status_code=CLIENT_LEFT)
            result = work.result()
            metrics.ended()
            return answer_of(result, headers=headers)
        except ServingError as error:
            metrics.failed(error.code)
            raise
        finally:
            gone.cancel()
            work.cancel()
            answer.cancel("client disconnected")
            metrics.ended()


def _asked(request: Request) -> Asked:
    scope = request_scope(request.scope)
    return Asked(
        parameters=request.path_params,
        query=request.query_params,
        headers=fields_of(request.scope),
        tenant=scope.tenant,
        request_id=scope.request_id,
    )
