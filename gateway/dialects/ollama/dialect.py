"""Ollama's dialect as one entry."""

from __future__ import annotations

from gateway.dialects.dialect import Dialect, DialectPaths
from gateway.dialects.ollama import models
from gateway.dialects.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest
from gateway.dialects.ollama.chat import Chat
from gateway.dialects.ollama.generate import Generate
from gateway.dialects.ollama.lines import LINES
from gateway.dialects.ollama.making import Copy, CopyRequest, Create, CreateRequest, Delete, Pull, PullRequest
from gateway.dialects.ollama.verbs import AnyRequest, NamedModel, Refused, Show, ShowRequest
from gateway.http.api import JSON, ApiPart, fields, get, post
from gateway.http.problem import Json, Problem
from gateway.tenants.tenants import BEARER

CHAT, GENERATE = "/api/chat", "/api/generate"
SHOW, PULL = "/api/show", "/api/pull"
TAGS, LOADED, VERSION = "/api/tags", "/api/ps", "/api/version"
REFUSED = {
    "/api/push": Refused("nothing is published from here"),
}
CREATE, COPY, DELETE = "/api/create", "/api/copy", "/api/delete"
_TEXT: Json = {"type": "string"}
_ERROR = "OllamaError"
_ENDED = {"model": _TEXT, "created_at": _TEXT, "done": {"type": "boolean"}}
_LIST = fields({"models": {"type": "array", "items": {"type": "object"}}})


def _error(problem: Problem, request_id: str) -> tuple[int, Json]:
    is_unknown = problem.code == "model_not_found"  # clients look for these words
    return problem.status, {"error": f"model not found: {problem.message}" if is_unknown else problem.message}


DIALECT = Dialect(
    name="ollama",
    key=BEARER,
    paths=DialectPaths(
        endpoints={CHAT: Chat(), GENERATE: Generate()},
        calls={SHOW: Show(), PULL: Pull(), CREATE: Create(), COPY: Copy(), **REFUSED},
        deletes={DELETE: Delete()},
        views={TAGS: models.tags, LOADED: models.loaded, VERSION: models.version},
        prefixes=("/api",),
    ),
    error=_error,
    api=ApiPart(
        paths={
            CHAT: {
                "post": post(
                    OllamaChatRequest, fields(_ENDED | {"message": {"type": "object"}}), stream_type=LINES, error=_ERROR
                )
            },
            GENERATE: {
                "post": post(
                    OllamaGenerateRequest, fields(_ENDED | {"response": _TEXT}), stream_type=LINES, error=_ERROR
                )
            },
            SHOW: {
                "post": post(ShowRequest, fields({"capabilities": {"type": "array", "items": _TEXT}}), error=_ERROR)
            },
            PULL: {"post": post(PullRequest, fields({"status": _TEXT}), stream_type=LINES, error=_ERROR)},
            CREATE: {"post": post(CreateRequest, fields({"status": _TEXT}), stream_type=LINES, error=_ERROR)},
            COPY: {"post": post(CopyRequest, {}, error=_ERROR)},
            **{path: {"post": post(AnyRequest, {}, error=_ERROR)} for path in REFUSED},
            DELETE: {"delete": post(NamedModel, {}, error=_ERROR)},
            TAGS: {"get": get(TAGS, "The served models.", JSON, answer=_LIST, error=_ERROR)},
            LOADED: {"get": get(LOADED, "The models that a worker is ready for.", JSON, answer=_LIST, error=_ERROR)},
            VERSION: {
                "get": get(
                    VERSION, "The release whose API this is.", JSON, answer=fields({"version": _TEXT}), error=_ERROR
                )
            },
        },
        schemas={_ERROR: fields({"error": _TEXT})},
        bodies=(
            OllamaChatRequest,
            OllamaGenerateRequest,
            ShowRequest,
            PullRequest,
            CreateRequest,
            CopyRequest,
            NamedModel,
            AnyRequest,
        ),
    ),
)
