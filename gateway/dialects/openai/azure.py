"""Azure's paths of OpenAI's API: the deployment in the path is the model, and overrides a body's `model`.

Its other paths, below /openai/v1 or /openai, are those below /v1: see `gateway.http.application.served_path`.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from gateway.dialects.dialect import Endpoint
from gateway.dialects.openai.chat import Chat
from gateway.dialects.openai.completions import Completions
from gateway.dialects.openai.schema import ChatRequest, CompletionRequest
from gateway.http.api import ApiPart, post, ref
from gateway.http.streaming import EVENTS

DEPLOYMENT = "/openai/deployments/{deployment}"
CHAT, COMPLETIONS = f"{DEPLOYMENT}/chat/completions", f"{DEPLOYMENT}/completions"


def _of_deployment(body: Any) -> Any:
    """A body whose model is the path's deployment."""
    if not isinstance(body, dict) or "deployment" not in body:
        return body
    return {name: value for name, value in body.items() if name != "deployment"} | {"model": body["deployment"]}


class DeploymentChatRequest(ChatRequest):
    """Body of a deployment's chat."""

    _deployed = model_validator(mode="before")(_of_deployment)


class DeploymentCompletionRequest(CompletionRequest):
    """Body of a deployment's completion."""

    _deployed = model_validator(mode="before")(_of_deployment)


ENDPOINTS: dict[str, Endpoint[Any]] = {
    CHAT: Chat(DeploymentChatRequest),
    COMPLETIONS: Completions(DeploymentCompletionRequest),
}
API = ApiPart(
    paths={
        CHAT: {"post": post(ChatRequest, ref("ChatCompletion"), stream_type=EVENTS)},
        COMPLETIONS: {"post": post(CompletionRequest, ref("Completion"), stream_type=EVENTS)},
    }
)
