"""The paths of KServe's protocol and of Triton's extensions, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import StrictBool

from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked, Call, Dialect, DialectPaths, Endpoint, View
from gateway.dialects.kserve import objects
from gateway.dialects.kserve.binary import unpacked
from gateway.dialects.kserve.generate import Generate, GenerateRequest
from gateway.dialects.kserve.infer import Infer, InferRequest
from gateway.dialects.loading import TRITON_LOADS, TRITON_UNLOADS, NamedModelRequest
from gateway.dialects.unserved import Refused, RefusedRequest
from gateway.http.api import JSON, ApiPart, fields, get, post, ref
from gateway.http.application import told_path
from gateway.http.fields import StrictFields
from gateway.http.problem import Json, Problem
from gateway.http.streaming import EVENTS

ROOT = "/v2"
INDEX = f"{ROOT}/repository/index"
NO_SHARED_MEMORY = "there is no shared memory between clients and workers: send tensors in the request"
NO_TRACE = "traces are not set up by request: send a traceparent header, and see --otlp-endpoint"
NO_LOGGING = "logs are not set up by request: see --log-level and --log-requests"
_ERROR = "KServeError"


class IndexRequest(StrictFields):
    """Body of POST /v2/repository/index."""

    ready: StrictBool = False  # list ready models only


class Index:
    """The served models."""

    body = IndexRequest

    async def answer(self, body: IndexRequest, answers: Answers, asked: Asked) -> list[Json]:
        return objects.index(answers, only_ready=body.ready)


_REFUSED: Mapping[str, Refused] = {
    f"{ROOT}/systemsharedmemory/{{rest:path}}": Refused(NO_SHARED_MEMORY),
    f"{ROOT}/cudasharedmemory/{{rest:path}}": Refused(NO_SHARED_MEMORY),
    f"{ROOT}/trace/setting": Refused(NO_TRACE),
    f"{ROOT}/models/{{model:path}}/trace/setting": Refused(NO_TRACE),
    f"{ROOT}/logging": Refused(NO_LOGGING),
}


def of_models(below: str) -> tuple[str, str]:
    """A model's path, with and without its version. The versioned one goes first: names may have slashes."""
    return f"{ROOT}/models/{{model:path}}/versions/{{version}}{below}", f"{ROOT}/models/{{model:path}}{below}"


def _of_server(show: Callable[[Answers], Json]) -> View:
    return lambda answers, asked: show(answers)


def _of_model(show: Callable[[Answers, str, str | None], Json]) -> View:
    return lambda answers, asked: show(answers, asked.parameters.get("model", ""), asked.parameters.get("version"))


_MODEL_VIEWS = (
    ("/ready", "Whether a worker of a model is ready.", objects.model_ready),
    ("/config", "Triton's configuration of a model.", objects.config),
    ("/stats", "Counts of a model since this gateway's start.", objects.statistics),
    ("", "The tensors of a model.", objects.metadata),
)
_SERVER_VIEWS = (
    ("", "Name and version of this server.", objects.server),
    ("/health/live", "That this server lives.", objects.live),
    ("/health/ready", "Whether requests can be served now.", objects.ready),
)
_ENDPOINTS: tuple[tuple[str, Endpoint[Any]], ...] = (
    ("/infer", Infer(streams=False)),
    ("/generate", Generate(streams=False)),
    ("/generate_stream", Generate(streams=True)),
)
_CALLS: Mapping[str, Call[Any]] = {
    INDEX: Index(),
    f"{ROOT}/repository/models/{{model:path}}/load": TRITON_LOADS,
    f"{ROOT}/repository/models/{{model:path}}/unload": TRITON_UNLOADS,
}


_BODIES = (InferRequest, GenerateRequest, IndexRequest, RefusedRequest, NamedModelRequest)


def _views() -> dict[str, View]:
    found = {f"{ROOT}{below}": _of_server(show) for below, _, show in _SERVER_VIEWS}
    found[f"{ROOT}/models/stats"] = _of_model(objects.statistics)
    found |= {path: refused.view for path, refused in _REFUSED.items()}
    return found | {path: _of_model(show) for below, _, show in _MODEL_VIEWS for path in of_models(below)}


def _api() -> ApiPart:
    paths: dict[str, dict[str, Json]] = {
        INDEX: {"post": post(IndexRequest, {"type": "array", "items": {"type": "object"}}, error=_ERROR)}
    }
    gets = [(f"{ROOT}{below}", summary) for below, summary, _ in _SERVER_VIEWS]
    gets += [(f"{ROOT}/models/stats", "Counts of all models since this gateway's start.")]
    gets += [(told_path(path), summary) for below, summary, _ in _MODEL_VIEWS for path in of_models(below)]
    for path, summary in gets:
        paths[path] = {"get": get(path, summary, JSON, error=_ERROR)}
    for below, endpoint in _ENDPOINTS:
        stream_type = EVENTS if isinstance(endpoint, Generate) and endpoint.streams else ""
        answer = ref("InferAnswer" if isinstance(endpoint, Infer) else "GenerateAnswer")
        for path in of_models(below):
            paths[told_path(path)] = {"post": post(endpoint.body, answer, stream_type=stream_type, error=_ERROR)}
    for path in _CALLS:
        if path != INDEX:
            paths[told_path(path)] = {"post": post(NamedModelRequest, {}, error=_ERROR)}
    for path, refused in _REFUSED.items():
        why = f"Refused: {refused.why}"
        paths[told_path(path)] = {
            "post": post(RefusedRequest, {}, error=_ERROR) | {"summary": why},
            "get": get(told_path(path), why, JSON, error=_ERROR),
        }
    text: Json = {"type": "string"}
    named = {"model_name": text, "model_version": text}
    tensor = fields({"name": text, "datatype": text, "shape": {"type": "array", "items": {"type": "integer"}}})
    schemas = {
        _ERROR: fields({"error": text}),
        "GenerateAnswer": fields(named),
        "InferAnswer": fields(named | {"outputs": {"type": "array", "items": tensor}}),
    }
    return ApiPart(
        paths=paths,
        bodies=_BODIES,
        schemas=schemas,
    )


def _error(problem: Problem, request_id: str) -> tuple[int, Json]:
    return problem.status, {"error": problem.message}


DIALECT = Dialect(
    name="kserve",
    api=_api(),
    error=_error,
    paths=DialectPaths(
        endpoints={path: endpoint for below, endpoint in _ENDPOINTS for path in of_models(below)},
        calls={**_CALLS, **_REFUSED},
        views=_views(),
        open_paths=(f"{ROOT}/health/live", f"{ROOT}/health/ready"),
        prefixes=(ROOT,),
    ),
    unpack=unpacked,
)
