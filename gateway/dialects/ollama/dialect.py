"""Ollama's dialect as one entry."""

from __future__ import annotations

from gateway.dialects.dialect import Dialect, DialectPaths
from gateway.dialects.ollama import models
from gateway.dialects.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest
from gateway.dialects.ollama.chat import Chat
from gateway.dialects.ollama.generate import Generate
from gateway.dialects.ollama.lines import LINES
from gateway.dialects.ollama.verbs import AnyRequest, Pull, PullRequest, Refused, Show, ShowRequest
from gateway.http.api import JSON, ApiPart, fields, get, post
from gateway.http.problem import Json, Problem
from gateway.tenants.tenants import BEARER

CHAT, GENERATE = "/api/chat", "/api/generate"
SHOW, PULL = "/api/show", "/api/pull"
TAGS, LOADED, VERSION = "/api/tags", "/api/ps", "/api/version"
_MADE_ELSEWHERE = "models come and go with workers: start or stop those, or give a name with --alias"
_NO_EMBEDDINGS = Refused("this model does not support embeddings", about_served=True)
_NOT_HERE = Refused(_MADE_ELSEWHERE, about_served=False)
REFUSED = {
    "/api/embed": _NO_EMBEDDINGS,
    "/api/embeddings": _NO_EMBEDDINGS,
    "/api/create": _NOT_HERE,
    "/api/push": Refused("nothing is published from here", about_served=True),
    "/api/copy": Refused(_MADE_ELSEWHERE, about_served=True),
}
DELETE = "/api/delete"
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
        calls={SHOW: Show(), PULL: Pull(), **REFUSED},
        deletes={DELETE: Refused(_MADE_ELSEWHERE, about_served=True)},
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
            **{path: {"post": post(AnyRequest, {}, error=_ERROR)} for path in REFUSED},
            DELETE: {"delete": post(AnyRequest, {}, error=_ERROR)},
            TAGS: {"get": get(TAGS, "The served models.", JSON, answer=_LIST, error=_ERROR)},
            LOADED: {"get": get(LOADED, "The models that a worker is ready for.", JSON, answer=_LIST, error=_ERROR)},
            VERSION: {
                "get": get(
                    VERSION, "The release whose API this is.", JSON, answer=fields({"version": _TEXT}), error=_ERROR
                )
            },
        },
        schemas={_ERROR: fields({"error": _TEXT})},
        bodies=(OllamaChatRequest, OllamaGenerateRequest, ShowRequest, PullRequest, AnyRequest),
    ),
)
