"""The routes. What an answer is made of is `gateway.dialect`; this file reads bodies, counts, and watches the connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request, Response

from common.errors import InvalidRequestError, RateLimitedError, ServingError
from gateway import openapi
from gateway.attainment import ServiceLevels
from gateway.body import read_body
from gateway.dialect import Answer, Dialect, Origin
from gateway.metrics import AnswerMetrics, GatewayMetrics
from gateway.responses import error_body, error_code, error_response, error_status, json_response
from gateway.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse_body
from gateway.spans import RequestTrace
from gateway.stream import DONE, EventStream, disconnected, event
from gateway.tenant_metrics import TenantMetrics
from gateway.tenants import Tenants
from gateway.timeline import MAX_RECENT

log = logging.getLogger("baton.http")

VERSION = "0.1.0"
MAX_REQUEST_ID = 200  # characters
AT_ONCE_S = 0.02  # most requests have started by then; only of others it is worth to watch the connection

Body = TypeVar("Body", ChatRequest, CompletionRequest)
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """What the HTTP side needs to know."""

    served_model: str
    tenants: Tenants = field(default_factory=Tenants)  # by default no key is needed
    max_body_bytes: int = 10 << 20
    body_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    gateway_id: str = ""
    trace_share: float = 1.0  # of the requests that bring no trace of their own
    levels: ServiceLevels = field(default_factory=ServiceLevels)
    console: bool = True  # serve the page and what it asks for


def _trace(request: Request) -> RequestTrace:
    trace: RequestTrace = request.scope["baton.trace"]
    return trace


class Routes:
    """Endpoints by path."""

    def __init__(
        self,
        dialect: Dialect,
        metrics: GatewayMetrics,
        settings: HttpSettings,
        tenant_metrics: TenantMetrics,
        elsewhere: Callable[[str], Awaitable[list[dict[str, Any]]]] | None = None,
        *,
        has_batches: bool = False,
    ) -> None:
        """`elsewhere` finds time lines at other gateways."""
        self._has_batches = has_batches
        self._dialect = dialect
        self._generations = dialect.generations
        self._tokenizer = dialect.tokenizer
        self._metrics = metrics
        self._tenant_metrics = tenant_metrics
        self._elsewhere = elsewhere
        self._has_console = settings.console and elsewhere is not None
        self._settings = settings
        self._started_at = int(time.time())
        self.posts: dict[str, Endpoint] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        self.gets: dict[str, Endpoint] = {
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
            "/health": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
            "/version": self.version,
            "/openapi.json": self.openapi,
            "/debug/requests": self.timelines,
            "/debug/requests/{request_id}": self.timeline,
        }

    # -- generation --------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._generate(request, ChatRequest, self._dialect.start_chat)

    async def complete(self, request: Request) -> Response:
        """OpenAI's completions."""
        return await self._generate(request, CompletionRequest, self._dialect.start_completion)

    async def _generate(
        self, request: Request, kind: type[Body], start: Callable[[Body, Origin], Coroutine[Any, Any, Answer]]
    ) -> Response:
        started: float = request.scope.get("baton.received_at") or time.monotonic()
        try:
            tenant = request.scope["tenant"]  # who can't come in is told before the work of reading and tokenising
            self._generations.turn_away(tenant, priority=tenant.max_priority)
            body = parse_body(await self._raw_body(request), kind)
            self._dialect.check_model(body.model)
            deadline_s = body.timeout or self._settings.request_timeout_s
            first_token_s = min(deadline_s, body.ttft_timeout or deadline_s)
            self._generations.turn_away(tenant, priority=body.priority, first_token_s=first_token_s)
            origin = Origin(tenant, _trace(request).context, started)
            answer = await self._unless_gone(request, start(body, origin))
        except ServingError as error:
            self._metrics.failed(error_code(error))
            if isinstance(error, RateLimitedError):
                self._metrics.refused(f"budget: {error.what}")
            raise
        if answer is None:
            self._metrics.failed("client_left")
            return Response(status_code=499)  # nobody reads it
        return await self._answer(request, body, answer, started)

    async def _unless_gone(self, request: Request, start: Coroutine[Any, Any, Answer]) -> Answer | None:
        """Start an answer, which may have to wait; a client that hangs up gives its place up, and the answer is None."""
        starting, gone = asyncio.create_task(start), None
        try:
            await asyncio.wait([starting], timeout=AT_ONCE_S)
            if not starting.done():
                gone = asyncio.create_task(disconnected(request))
                await asyncio.wait([starting, gone], return_when=asyncio.FIRST_COMPLETED)
            return starting.result() if starting.done() else None
        finally:
            if gone is not None:
                gone.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait([starting])

    async def _answer(
        self, request: Request, body: ChatRequest | CompletionRequest, answer: Answer, started: float
    ) -> Response:
        _trace(request).body, _trace(request).answer = body, answer
        metrics = AnswerMetrics(self._metrics, answer, started)
        if not body.stream:
            return await self._whole(request, body, answer, metrics)

        async def close() -> None:
            await answer.cancel("client disconnected")
            metrics.ended("abort")  # unless it was counted already

        return EventStream(self._events(body, answer, metrics), close=close, headers=answer.headers)

    async def _whole(
        self, request: Request, body: ChatRequest | CompletionRequest, answer: Answer, metrics: AnswerMetrics
    ) -> Response:
        """One JSON object; a client that hangs up before it is there cancels the work."""
        work = asyncio.create_task(self._dialect.whole(body, answer, metrics.watch(answer.pieces())))
        gone = asyncio.create_task(disconnected(request))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.info("http.client_left", extra={"answer": answer.id})
                return Response(status_code=499)  # nobody reads it
            result = work.result()
            metrics.ended()
            response = json_response(result)
            response.headers.update(answer.headers)
            return response
        except ServingError as error:
            metrics.failed(error_code(error))
            raise
        finally:
            gone.cancel()
            work.cancel()
            await answer.cancel("client disconnected")
            metrics.ended("abort")

    async def _events(
        self, body: ChatRequest | CompletionRequest, answer: Answer, metrics: AnswerMetrics
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream. An error in its middle is an event too, and no `[DONE]` follows it."""
        head = self._dialect.head(answer, chunk=True)
        usage: dict[str, Any] = {"usage": None} if body.include_usage else {}
        try:
            for choice in answer.choices:
                opening = self._dialect.opening(body, answer, choice)
                if opening is not None:
                    yield event(head | {"choices": [opening]} | usage)
            async with contextlib.aclosing(metrics.watch(answer.pieces())) as pieces:
                async for choice, piece in pieces:
                    entry = self._dialect.chunk_choice(body, choice, piece)
                    if entry is not None:
                        if body.continuous_usage:
                            usage["usage"] = answer.usage()
                        said = event(head | {"choices": [entry]} | usage)
                        choice.generation.timeline.shown(time.monotonic(), sent=True)
                        yield said
            if body.include_usage:
                yield event(head | {"choices": [], "usage": answer.usage()})
            metrics.ended()
            yield DONE
        except ServingError as error:
            code = error_code(error)
            metrics.failed(code)
            log.warning("http.stream_failed", extra={"answer": answer.id, "code": code})
            yield event(error_body(error.message, kind=error_status(error)[1], param=error.param, code=code))
        except Exception:
            metrics.failed("internal")
            log.exception("http.stream_crashed", extra={"answer": answer.id})
            yield event(error_body("internal error", kind="server_error", code="internal"))

    async def _raw_body(self, request: Request) -> bytes:
        settings = self._settings
        return await read_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)

    # -- the rest ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """The served model, as a list."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """One model."""
        self._dialect.check_model(request.path_params["model"])
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._settings.served_model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "baton",
            "max_model_len": self._generations.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """Token ids of `prompt` or of chat `messages`."""
        body = parse_body(await self._raw_body(request), TokenizeRequest)
        if body.messages is not None:
            messages = [message.as_template_input() for message in body.messages]
            tokens = await asyncio.to_thread(
                self._tokenizer.encode_chat, messages, add_generation_prompt=body.add_generation_prompt
            )
        else:
            tokens = await asyncio.to_thread(
                self._tokenizer.encode, body.prompt or "", add_special_tokens=body.add_special_tokens
            )
        length = self._generations.max_model_len
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": length})

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`."""
        body = parse_body(await self._raw_body(request), DetokenizeRequest)
        if any(token >= self._tokenizer.vocab_size for token in body.tokens):
            raise InvalidRequestError("a token is not in the vocabulary", param="tokens")
        text = await asyncio.to_thread(self._tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    async def health(self, request: Request) -> Response:
        """This process answers."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a request would be served now, or why not."""
        reason = self._generations.not_ready_reason
        if reason:
            return json_response({"status": "not ready", "reason": reason}, status=503)
        return json_response({"status": "ready", "workers": self._generations.ready_workers})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        generations = self._generations
        await self._tenant_metrics.refresh()
        text = self._metrics.render(
            in_flight=generations.in_flight, counts=generations.counters, waiting=generations.waiting
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    async def timelines(self, request: Request) -> Response:
        """Where the time of recent requests went: running, latest, slowest. See docs/observability.md."""
        limit = request.query_params.get("limit", "32")
        if not (limit.isdecimal() and len(limit) < 5):
            raise InvalidRequestError(f"limit: {limit[:20]!r} is not a number from 0 to 9999", param="limit")
        return json_response(self._generations.timelines.as_json(int(limit)))

    async def timeline(self, request: Request) -> Response:
        """Every choice of one answer, or one of them; also of an answer of another gateway."""
        wanted = request.path_params["request_id"]
        found = [timeline.as_json() for timeline in self._generations.timelines.find(wanted)]
        if not found and self._elsewhere is not None and len(wanted) <= MAX_REQUEST_ID:
            found = await self._elsewhere(wanted)
        if not found:
            return error_response(404, f"no recent request {wanted[:100]!r}: each gateway keeps the last {MAX_RECENT}")
        return json_response({"requests": found})

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        tenants = self._settings.tenants
        document = openapi.document(
            version=VERSION,
            needs_key=not tenants.open_to_all,
            has_admin=tenants.keys.has_admin,
            has_console=self._has_console,
            has_batches=self._has_batches,
        )
        return json_response(document)

    async def version(self, request: Request) -> Response:
        """Baton's version."""
        return json_response({"version": VERSION})
