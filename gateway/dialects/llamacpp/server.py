"""Calls and views of the server: its properties, its slots, the chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, StrictStr

from common import VERSION
from common.errors import UnavailableError
from common.messages import WorkerState
from common.words import Role
from gateway.answers.ask import Conversation
from gateway.answers.catalogue import Served
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.dialects.llamacpp.objects import settings_of
from gateway.dialects.openai.chat import Chat
from gateway.dialects.openai.schema import ChatRequest
from gateway.http.fields import StrictFields
from gateway.http.problem import Json

MAX_SLOTS = 1_024  # listed


class ApplyTemplateRequest(ChatRequest):
    """Body of POST /apply-template."""

    model: StrictStr = ""  # the first served one


class ApplyTemplate:
    """Messages in, the prompt's text out."""

    body = ApplyTemplateRequest

    async def answer(self, body: ApplyTemplateRequest, answers: Answers, asked: Asked) -> Any:
        tokenizer = answers.find(body.model).tokenizer
        (prompt,) = Chat().ask(body).prompts
        assert isinstance(prompt, Conversation)
        render = partial(tokenizer.render, prompt.messages, **prompt.rendering)
        return {"prompt": await asyncio.to_thread(render)}


class ControlRequest(StrictFields):
    """Body of POST /v1/chat/completions/control."""

    id: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    action: Literal["reasoning_end"]


class Control:
    """Ends the reasoning of a running answer. `success` is false if nothing thinks any more."""

    body = ControlRequest

    async def answer(self, body: ControlRequest, answers: Answers, asked: Asked) -> Json:
        return {"success": await answers.steering.end_reasoning(body.id, asked.tenant.name)}


def props(answers: Answers, asked: Asked) -> Json:
    """A model's properties: the first one's, or those of `?model=`."""
    served = answers.find(asked.query.get("model", ""))
    tokenizer = served.tokenizer
    return {
        "default_generation_settings": {"params": settings_of(tokenizer.defaults), "n_ctx": served.max_model_len or 0},
        "total_slots": max(1, _places(_decoders(answers, served))),
        "model_alias": served.asked_as,
        "model_path": served.name,
        "chat_template": tokenizer.template_source,
        "bos_token": tokenizer.special("bos_token"),
        "eos_token": tokenizer.special("eos_token"),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"baton-{VERSION}",
        "is_sleeping": False,
    }


def slots(answers: Answers, asked: Asked) -> list[Json]:
    """The decode batch's slots; their owners are not shown. Raises UnavailableError."""
    served = answers.find(asked.query.get("model", ""))
    workers = _decoders(answers, served)
    places, busy = _places(workers), sum(state.running for state in workers)
    if asked.query.get("fail_on_no_slot") and busy >= places:
        raise UnavailableError("no slot is free")
    return [
        {"id": number, "n_ctx": served.max_model_len or 0, "speculative": False, "is_processing": number < busy}
        for number in range(min(places, MAX_SLOTS))
    ]


def _decoders(answers: Answers, served: Served) -> Sequence[WorkerState]:
    return [
        state
        for state in answers.generations.fleet()
        if Role.DECODE in state.roles and state.model_fingerprint == served.fingerprint
    ]


def _places(workers: Sequence[WorkerState]) -> int:
    return sum(state.max_sequences for state in workers)
