"""A request's word on drafts: how many, and the text that its client predicts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from common.blocks import unpack_tokens
from gateway.request.spec import DraftRules
from tests.unit.gateway.conftest import MODEL, Gateway

NAMES = {"chat/completions": {"messages": [{"role": "user", "content": "Hello"}]}, "completions": {"prompt": "Hello"}}


async def ask(gateway: Gateway, said: dict[str, Any], *, route: str = "chat/completions") -> httpx.Response:
    return await gateway.http.post(f"/v1/{route}", json={"model": MODEL} | NAMES[route] | said)


@pytest.mark.parametrize("route", NAMES)
@pytest.mark.parametrize(
    ("said", "most"),
    [
        ({}, -1),
        ({"speculation": True}, -1),
        ({"speculation": False}, 0),
        ({"speculation": 1}, 1),
        ({"speculative.n_max": 0}, 0),
        ({"speculative.n_max": 99}, 32),
    ],
)
async def test_a_request_says_how_many_tokens_are_drafted(
    gateway: Gateway, route: str, said: dict[str, Any], most: int
) -> None:
    assert (await ask(gateway, said, route=route)).status_code == 200
    assert gateway.script.submitted[-1].drafts == DraftRules(most)


WAYS: dict[str, tuple[str, str]] = {  # path, and the object that has the field
    "messages": ("/v1/messages", ""),
    "responses": ("/v1/responses", ""),
    "ollama chat": ("/api/chat", "options"),
    "ollama generate": ("/api/generate", "options"),
    "tgi": ("/generate", "parameters"),
    "sagemaker": ("/invocations", "parameters"),
    "llama.cpp": ("/completion", ""),
    "kserve": (f"/v2/models/{MODEL}/generate", ""),
    "kserve's parameters": (f"/v2/models/{MODEL}/generate", "parameters"),
}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": MODEL, "messages": HELLO, "max_tokens": 8},
    "/v1/responses": {"model": MODEL, "input": "Hello"},
    "/api/chat": {"model": MODEL, "messages": HELLO, "stream": False},
    "/api/generate": {"model": MODEL, "prompt": "Hello", "raw": True, "stream": False},
    "/generate": {"inputs": "Hello"},
    "/invocations": {"inputs": "Hello"},
    "/completion": {"prompt": "Hello"},
    f"/v2/models/{MODEL}/generate": {"text_input": "Hello"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("said", "most"), [(True, -1), (False, 0), (3, 3)])
async def test_every_dialect_says_how_many_tokens_are_drafted(
    gateway: Gateway, way: str, said: bool | int, most: int
) -> None:
    assert (await said_in(gateway, way, said)).status_code == 200
    assert gateway.script.submitted[-1].drafts == DraftRules(most)


@pytest.mark.parametrize("way", WAYS)
async def test_every_dialect_refuses_more_drafted_tokens_than_there_are(gateway: Gateway, way: str) -> None:
    answer = await said_in(gateway, way, 33)
    assert answer.status_code in (400, 422)
    assert "speculation: true, false, or the most tokens to draft in a step, from 0 to 32, is needed" in answer.text
    assert gateway.script.submitted == []


async def said_in(gateway: Gateway, way: str, said: bool | int) -> httpx.Response:
    path, within = WAYS[way]
    field = {"speculation": said}
    return await gateway.http.post(path, json=BODIES[path] | ({within: field} if within else field))


@pytest.mark.parametrize(
    "content", ["the answer", [{"type": "text", "text": "the "}, {"type": "text", "text": "answer"}]]
)
async def test_a_predicted_text_goes_along_in_tokens(gateway: Gateway, content: object) -> None:
    assert (await ask(gateway, {"prediction": {"type": "content", "content": content}})).status_code == 200
    tokens = gateway.tokenizer.encode("the answer", add_special_tokens=False, parse_special=False)
    assert unpack_tokens(gateway.script.submitted[-1].drafts.prediction) == tokens


@pytest.mark.parametrize(
    "said",
    [
        {"speculation": 33},
        {"speculation": -1},
        {"speculation": "yes"},
        {"prediction": {"type": "text", "content": "a"}},
        {"prediction": {"type": "content"}},
        {"prediction": {"type": "content", "content": "word " * 5000}},
    ],
    ids=str,
)
async def test_a_wrong_word_on_drafts_is_refused_by_name(gateway: Gateway, said: dict[str, Any]) -> None:
    answer = await ask(gateway, said)
    assert answer.status_code == 400
    assert next(iter(said)) in str(answer.json()["error"])
    assert gateway.script.submitted == []
