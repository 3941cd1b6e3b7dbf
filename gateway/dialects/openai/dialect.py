"""OpenAI's dialect as one entry."""

from __future__ import annotations

from gateway.answers.start import Answers, ModelCard
from gateway.dialects.dialect import Asked, Dialect, DialectPaths
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
    return {"object": "list", "data": [_card(model) for model in answers.models()]}


def _one(answers: Answers, asked: Asked) -> Json:
    return _card(answers.model(asked.parameters["model"]))


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
        calls={CHAT_RENDER: Render(Chat()), COMPLETIONS_RENDER: Render(Completions(), has_several=True)},
        views={MODELS: _listed, f"{MODELS}/{{model:path}}": _one},
        prefixes=("/v1", "/openai"),
    ),
    error=_error,
    api=ApiPart(
        paths={
            CHAT: {"post": post(ChatRequest, ref("ChatCompletion"), stream_type=EVENTS)},
            COMPLETIONS: {"post": post(CompletionRequest, ref("Completion"), stream_type=EVENTS)},
            CHAT_RENDER: {"post": post(ChatRequest, RENDERED)},
            COMPLETIONS_RENDER: {"post": post(CompletionRequest, {"type": "array", "items": RENDERED})},
            MODELS: {"get": get(MODELS, "The served models.", JSON, answer=ref("ModelList"))},
            f"{MODELS}/{{model}}": {"get": get(f"{MODELS}/{{model}}", "One model.", JSON, answer=ref("Model"))},
            **azure.API.paths,
        },
        bodies=(ChatRequest, CompletionRequest),
        schemas=ANSWERS,
    ),
)
