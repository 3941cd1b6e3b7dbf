"""The HTTP application: routes, bodies, errors, disconnects. What an answer is made of is `gateway.dialect`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    ServingError,
    UnavailableError,
)
from gateway.dialect import Answer, ContextLengthError, Dialect
from gateway.generation import Generations
from gateway.metrics import GatewayMetrics
from gateway.responses import error_body
from gateway.schema import ChatRequest, CompletionRequest
from gateway.tokenizer import ChatTokenizer

log = logging.getLogger("baton.http")

VERSION = "0.1.0"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_OPEN_PATHS = frozenset({"/health", "/ready"})
_json = msgspec.json.Encoder()

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """What the HTTP side needs to know."""

    served_model: str
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    max_body_bytes: int = 10 << 20
    request_timeout_s: float = 600.0


def create_app(*, generations: Generations, tokenizer: ChatTokenizer, settings: HttpSettings) -> FastAPI:
    """Build the application. It owns no connection: start and stop `generations` around it."""
    app = FastAPI(title="Baton", version=VERSION, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    dialect = Dialect(
        generations=generations,
        tokenizer=tokenizer,
        served_model=settings.served_model,
        default_deadline_s=settings.request_timeout_s,
    )
    metrics = GatewayMetrics(settings.served_model)
    server = _Server(dialect, metrics, settings)
    app.add_exception_handler(ServingError, _on_serving_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_crash)
    app.add_middleware(Envelope, api_keys=settings.api_keys)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.complete)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{model:path}")(server.model)
    app.post("/tokenize")(server.tokenize)
    app.post("/detokenize")(server.detokenize)
    app.get("/health")(server.health)
    app.get("/ready")(server.ready)
    app.get("/metrics")(server.render_metrics)
    app.get("/version")(server.version)
    return app


class _Server:
    def __init__(self, dialect: Dialect, metrics: GatewayMetrics, settings: HttpSettings) -> None:
        self._dialect = dialect
        self._generations = dialect.generations
        self._tokenizer = dialect.tokenizer
        self._metrics = metrics
        self._settings = settings
        self._started_at = int(time.time())

    # -- generation --------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        body = await self._body(request, ChatRequest)
        return await self._answer(request, body, lambda: self._dialect.start_chat(body))

    async def complete(self, request: Request) -> Response:
        """OpenAI's completions."""
        body = await self._body(request, CompletionRequest)
        return await self._answer(request, body, lambda: self._dialect.start_completion(body))

    async def _answer(
        self, request: Request, body: ChatRequest | CompletionRequest, start: Callable[[], Awaitable[Answer]]
    ) -> Response:
        started = time.monotonic()
        if body.model != self._settings.served_model:
            return _error(
                404,
                f"the model {body.model!r} does not exist; this gateway serves {self._settings.served_model!r}",
                param="model",
                code="model_not_found",
            )
        try:
            answer = await start()
        except ServingError as error:
            self._metrics.failed(error.code)
            raise
        if body.stream:
            events = self._stream(body, answer, started)
            return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        return await self._whole(request, body, answer, started)

    async def _whole(
        self, request: Request, body: ChatRequest | CompletionRequest, answer: Answer, started: float
    ) -> Response:
        """One JSON object; a client that hangs up before it is there cancels the work."""
        work = asyncio.create_task(self._dialect.whole(body, answer))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                log.info("http.client_left", extra={"answer": answer.id})
                return Response(status_code=499)
            result = work.result()
        except ServingError as error:
            self._metrics.failed(error.code)
            raise
        finally:
            gone.cancel()
            work.cancel()
            await answer.cancel("client disconnected")
        self._count(answer, {entry["index"]: entry["finish_reason"] for entry in result["choices"]}, started)
        return Response(_json.encode(result), media_type="application/json")

    async def _stream(
        self, body: ChatRequest | CompletionRequest, answer: Answer, started: float
    ) -> AsyncIterator[bytes]:
        """Server-sent events. Closing this iterator (the client hung up) cancels the work."""
        head = self._dialect.head(answer, chunk=True)
        no_usage = {"usage": None} if body.include_usage else {}
        finishes: dict[int, str] = {}
        lengths: dict[int, int] = {}
        last: dict[int, float] = {}
        try:
            for choice in answer.choices:
                opening = self._opening(body, answer, choice.index)
                if opening is not None:
                    yield _event(head | {"choices": [opening]} | no_usage)
            async with contextlib.aclosing(answer.pieces()) as pieces:
                async for choice, piece in pieces:
                    now = time.monotonic()
                    self._time(choice.index, now, started, last)
                    if piece.finish:
                        finishes[choice.index] = piece.finish
                    if piece.text or piece.finish or piece.logprobs or body.return_token_ids:
                        offset = lengths.get(choice.index, 0)
                        lengths[choice.index] = offset + len(piece.text)
                        entry = self._dialect.chunk_choice(body, choice, piece, offset=offset)
                        yield _event(head | {"choices": [entry]} | no_usage)
            if body.include_usage:
                yield _event(head | {"choices": [], "usage": answer.usage()})
            yield b"data: [DONE]\n\n"
            self._count(answer, finishes, started)
        except ServingError as error:
            self._metrics.failed(error.code)
            status, kind = _status_of(error)
            yield _event(error_body(error.message, kind=kind, param=error.param, code=error.code))
            log.warning("http.stream_failed", extra={"answer": answer.id, "code": error.code, "status": status})
        finally:
            await answer.cancel("client disconnected")

    def _opening(self, body: ChatRequest | CompletionRequest, answer: Answer, index: int) -> dict[str, Any] | None:
        entry: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if isinstance(body, ChatRequest):
            return entry | {"delta": {"role": "assistant", "content": "", "refusal": None}}
        echo = self._dialect.echo(body, answer, index)
        return entry | {"text": echo} if echo else None

    def _time(self, index: int, now: float, started: float, last: dict[int, float]) -> None:
        name = self._settings.served_model
        if index in last:
            self._metrics.itl.labels(name).observe(now - last[index])
        else:
            self._metrics.ttft.labels(name).observe(now - started)
        last[index] = now

    def _count(self, answer: Answer, finishes: dict[int, str], started: float) -> None:
        seconds = time.monotonic() - started
        per_prompt = max(1, len(answer.choices) // max(1, len(answer.prompts)))
        for choice in answer.choices:
            self._metrics.observe_timings(choice.generation.timings)
            self._metrics.finished(
                reason=finishes.get(choice.index, "abort"),
                prompt=len(answer.prompts[choice.index // per_prompt]),
                generated=choice.completion_tokens,
                cached=choice.cached_tokens,
                seconds=seconds,
            )

    # -- bodies --------------------------------------------------------------------------------------------------------

    async def _body(self, request: Request, model: type[Body]) -> Body:
        return parse_body(await self._raw_body(request), model)

    async def _raw_body(self, request: Request) -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._settings.max_body_bytes:
                raise HTTPException(413, f"the body is larger than {self._settings.max_body_bytes} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    # -- the rest ------------------------------------------------------------------------------------------------------

    async def models(self) -> Response:
        """The served model, as a list."""
        return _ok({"object": "list", "data": [self._model_card()]})

    async def model(self, model: str) -> Response:
        """One model."""
        if model != self._settings.served_model:
            return _error(404, f"the model {model!r} does not exist", param="model", code="model_not_found")
        return _ok(self._model_card())

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
        body = await self._body(request, _Tokenize)
        if body.messages is not None:
            options = {"add_generation_prompt": body.add_generation_prompt}
            tokens = await asyncio.to_thread(self._tokenizer.encode_chat, body.messages, **options)
        else:
            tokens = await asyncio.to_thread(self._tokenizer.encode, body.prompt or "")
        return _ok({"tokens": tokens, "count": len(tokens), "max_model_len": self._generations.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`."""
        body = await self._body(request, _Detokenize)
        if any(not 0 <= token < self._tokenizer.vocab_size for token in body.tokens):
            raise InvalidRequestError("a token is not in the vocabulary", param="tokens")
        return _ok({"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def health(self) -> Response:
        """This process answers."""
        return _ok({"status": "ok"})

    async def ready(self) -> Response:
        """Whether a request would be served now, or why not."""
        reason = self._generations.not_ready_reason
        if reason:
            return Response(_json.encode({"status": "not ready", "reason": reason}), 503, media_type="application/json")
        return _ok({"status": "ready", "workers": self._generations.ready_workers})

    async def render_metrics(self) -> Response:
        """Prometheus text."""
        return Response(
            self._metrics.render(in_flight=self._generations.in_flight), media_type="text/plain; version=0.0.4"
        )

    async def version(self) -> Response:
        """Baton's version."""
        return _ok({"version": VERSION})


class Envelope:
    """Gives every answer its request id, and asks for a key where one is configured. Plain ASGI: streams pass untouched."""

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.match(asked) else uuid.uuid4().hex

        async def send_with_id(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if self._keys and scope["path"] not in _OPEN_PATHS and not self._has_key(headers):
            refusal = _error(401, "a valid API key is needed: send `Authorization: Bearer KEY`", code="invalid_api_key")
            await refusal(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]  # all of them: constant time
        return scheme.lower() == "bearer" and any(matches)


class _Tokenize(BaseModel):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True


class _Detokenize(BaseModel):
    model: str | None = None
    tokens: list[int]


def parse_body(raw: bytes, model: type[Body]) -> Body:
    """Validate a JSON body. Raises InvalidRequestError that names the first wrong field."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first["type"], [str(part) for part in first["loc"]], first["msg"]) from None


def _invalid(kind: str, where: list[str], message: str) -> InvalidRequestError:
    message = message.removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return InvalidRequestError(
            f"unknown field {'.'.join(where)!r}: remove it or check its spelling", param=where[0]
        )
    if kind == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {message}")
    if not where:  # a rule over several fields: "field: what is wrong"
        param, separator, rest = message.partition(": ")
        return InvalidRequestError(message, param=param if separator and rest and param.isidentifier() else None)
    return InvalidRequestError(f"{'.'.join(where)}: {message}", param=where[0])


def _status_of(error: ServingError) -> tuple[int, str]:
    match error:
        case InvalidRequestError():
            return 400, "invalid_request_error"
        case OverloadedError():
            return 429, "rate_limit_error"
        case UnavailableError():
            return 503, "service_unavailable_error"
        case DeadlineExceededError():
            return 504, "timeout_error"
        case _:
            return 500, "server_error"


async def _on_serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    status, kind = _status_of(error)
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else error.code
    response = _error(status, error.message, kind=kind, param=error.param, code=code)
    if status in (429, 503):
        response.headers["retry-after"] = str(max(1, round(getattr(error, "retry_after_s", 1.0))))
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: f"no route {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    response = _error(error.status_code, known.get(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _on_crash(request: Request, error: Exception) -> Response:
    log.error("http.crash", exc_info=error)
    return _error(500, "internal error", kind="server_error", code="internal")


async def _disconnected(request: Request) -> None:
    """Return when the client hung up."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _json.encode(chunk) + b"\n\n"


def _ok(content: dict[str, Any]) -> Response:
    return Response(_json.encode(content), media_type="application/json")


def _error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> Response:
    body = error_body(message, kind=kind, param=param, code=code)
    return Response(_json.encode(body), status, media_type="application/json")
