"""Anthropic's dialect as one entry."""

from __future__ import annotations

from gateway.dialects.anthropic import models
from gateway.dialects.anthropic.described import ANSWERS
from gateway.dialects.anthropic.events import PING
from gateway.dialects.anthropic.messages import CountTokens, Messages
from gateway.dialects.anthropic.objects import error_object, status_of
from gateway.dialects.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.dialects.dialect import Dialect, DialectPaths
from gateway.dialects.render import RENDERED, Render
from gateway.dialects.unserved import Refused, RefusedRequest
from gateway.http.api import JSON, ApiPart, fields, get, post, ref
from gateway.http.problem import Json, NotKeptError, Problem
from gateway.http.streaming import EVENTS
from gateway.tenants.tenants import KeyForm, bearer_key

MESSAGES, COUNT, BATCHES = "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"
RENDER, MODELS = f"{MESSAGES}/render", "/v1/models"
_NO_BATCHES = Refused(
    "batches of messages are OpenAI's batches here: POST their lines with url /v1/messages as a file to /v1/files, then its id to"
    " /v1/batches",
    NotKeptError,
)
KEY = KeyForm(
    read=bearer_key,
    hint="`x-api-key: KEY`",
    scheme={
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "an API key; a bearer token does as well",
    },
)
_PAGES: tuple[Json, ...] = (
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": models.MAX_LIMIT}},
    *({"name": name, "in": "query", "schema": {"type": "string"}} for name in ("after_id", "before_id")),
)


def _error(problem: Problem, request_id: str) -> tuple[int, Json]:
    return status_of(problem), error_object(problem) | {"request_id": request_id}


DIALECT = Dialect(
    name="anthropic",
    key=KEY,
    paths=DialectPaths(
        endpoints={MESSAGES: Messages()},
        calls={COUNT: CountTokens(), RENDER: Render(Messages()), BATCHES: _NO_BATCHES},
        views={
            MODELS: models.listed,
            f"{MODELS}/{{model:path}}": models.one,
            BATCHES: _NO_BATCHES.view,
            f"{BATCHES}/{{rest:path}}": _NO_BATCHES.view,
        },
    ),
    recognises=lambda headers: "anthropic-version" in headers,
    id_header="request-id",
    idle_event=PING,
    error=_error,
    api=ApiPart(
        paths={
            MESSAGES: {
                "post": post(MessagesRequest, ref("AnthropicMessage"), stream_type=EVENTS, error="AnthropicError")
            },
            COUNT: {
                "post": post(CountTokensRequest, fields({"input_tokens": {"type": "integer"}}), error="AnthropicError"),
            },
            RENDER: {"post": post(MessagesRequest, RENDERED, error="AnthropicError")},
            MODELS: {
                "get": get(
                    MODELS,
                    "The served models.",
                    JSON,
                    query=_PAGES,
                    error="AnthropicError",
                    answer=ref("AnthropicModelList"),
                )
            },
            f"{MODELS}/{{model}}": {
                "get": get(
                    f"{MODELS}/{{model}}", "One model.", JSON, error="AnthropicError", answer=ref("AnthropicModel")
                )
            },
            BATCHES: {
                "post": post(RefusedRequest, {}, error="AnthropicError"),
                "get": get(BATCHES, "Says where batches are.", error="AnthropicError"),
            },
            f"{BATCHES}/{{rest}}": {
                "get": get(f"{BATCHES}/{{rest}}", "Says where batches are.", error="AnthropicError")
            },
        },
        bodies=(MessagesRequest, CountTokensRequest, RefusedRequest),
        schemas=ANSWERS,
    ),
)
