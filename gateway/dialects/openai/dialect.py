"""OpenAI's dialect as one entry."""

from __future__ import annotations

from gateway.answers.catalogue import ModelCard
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked, Dialect, DialectPaths
from gateway.dialects.loading import (
    ASLEEP,
    DELETED,
    DELETES,
    IS_SLEEPING,
    SLEEP,
    SLEEPS,
    WAKE_UP,
    WAKES,
    NamedModelRequest,
    sleeping,
)
from gateway.dialects.openai import azure
from gateway.dialects.openai.chat import Chat
from gateway.dialects.openai.completions import Completions
from gateway.dialects.openai.described import ANSWERS
from gateway.dialects.openai.schema import ChatRequest, CompletionRequest
from gateway.dialects.render import RENDERED, Render
from gateway.http.api import JSON, ApiPart, get, post, ref
from gateway.http.problem import Json, Problem, error_object
from gateway.http.streaming import EVENTS
from gateway.tenants.tenants import BEARER

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_RENDER, COMPLETIONS_RENDER = f"{CHAT}/render", f"{COMPLETIONS}/render"
MODELS = "/v1/models"


def _listed(answers: Answers, asked: Asked) -> Json:
    names = answers.catalogue.pooled_names
    pooled = [_pooled(name, own, answers) for name, own in names.items()]
    return {"object": "list", "data": [*(_card(model) for model in answers.models()), *pooled]}


def _one(answers: Answers, asked: Asked) -> Json:
    name = asked.parameters["model"]
    pooled = answers.catalogue.pooled_name(name)
    return _pooled(name, pooled, answers) if pooled else _card(answers.model(name))


def _pooled(name: str, own_name: str, answers: Answers) -> Json:
    """A model that makes vectors or scores, under one of its names."""
    its = answers.catalogue.pooled[own_name].pooling
    absent = dict.fromkeys(("whole_model_len", "whole_kv_memory_mb", "tool_call_format", "reasoning_format"))
    own = {"labels": list(its.labels)} if its.labels else {"dimensions": its.size, "similarity": its.similarity}
    return {
        "id": name,
        "object": "model",
        "created": answers.started_at,
        "owned_by": "baton",
        "root": own_name,
        "max_model_len": its.max_len,
        **absent,
        "capabilities": ["score"] if its.labels else ["embedding"],
        **own,
    }


def _card(model: ModelCard) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "root": model.own_name,
        "max_model_len": model.max_model_len,
        "whole_model_len": model.whole_len,
        "whole_kv_memory_mb": model.whole_kv_mb,
        "tool_call_format": model.tool_call_format,
        "reasoning_format": model.reasoning_format,
        "capabilities": ["completion", "chat"] if model.can_chat else ["completion"],
    }


def _error(problem: Problem, request_id: str) -> tuple[int, Json]:
    return problem.status, error_object(problem)


# Chat and completions. The gateway's own form of errors is OpenAI's.
DIALECT = Dialect(
    name="openai",
    key=BEARER,
    paths=DialectPaths(
        endpoints={CHAT: Chat(), COMPLETIONS: Completions(), **azure.ENDPOINTS},
        calls={
            CHAT_RENDER: Render(Chat()),
            COMPLETIONS_RENDER: Render(Completions(), has_several=True),
            SLEEP: SLEEPS,
            WAKE_UP: WAKES,
        },
        deletes={f"{MODELS}/{{model:path}}": DELETES},
        views={MODELS: _listed, f"{MODELS}/{{model:path}}": _one, IS_SLEEPING: sleeping},
        prefixes=("/v1", "/openai", "/v2/rerank", "/v2/embed"),  # Cohere's paths, amid KServe's
    ),
    error=_error,
    api=ApiPart(
        paths={
            CHAT: {"post": post(ChatRequest, ref("ChatCompletion"), stream_type=EVENTS)},
            COMPLETIONS: {"post": post(CompletionRequest, ref("Completion"), stream_type=EVENTS)},
            CHAT_RENDER: {"post": post(ChatRequest, RENDERED)},
            COMPLETIONS_RENDER: {"post": post(CompletionRequest, {"type": "array", "items": RENDERED})},
            MODELS: {"get": get(MODELS, "The served models.", JSON, answer=ref("ModelList"))},
            f"{MODELS}/{{model}}": {
                "get": get(f"{MODELS}/{{model}}", "One model.", JSON, answer=ref("Model")),
                "delete": get(f"{MODELS}/{{model}}", "Unload a model that a host loads.", JSON, answer=DELETED),
            },
            SLEEP: {"post": post(NamedModelRequest, {}) | {"summary": "Unload the models that hosts load, or one."}},
            WAKE_UP: {"post": post(NamedModelRequest, {}) | {"summary": "Load the models of hosts, or one."}},
            IS_SLEEPING: {"get": get(IS_SLEEPING, "True if no model of a host is loaded.", JSON, answer=ASLEEP)},
            **azure.API.paths,
        },
        bodies=(ChatRequest, CompletionRequest, NamedModelRequest),
        schemas=ANSWERS,
    ),
)
