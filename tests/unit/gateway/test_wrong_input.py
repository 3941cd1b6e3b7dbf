"""Wrong input is answered with the field that is wrong."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.unit.gateway.conftest import MODEL, Gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": MESSAGES, "max_tokens": 4},
    COMPLETIONS: {"model": MODEL, "prompt": "Hello", "max_tokens": 4},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} | more]}


def calls(function: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]}


WRONG_ON_BOTH: list[dict[str, Any]] = [
    {"no_such_field": 1}, {"temprature": 1},
    {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": "1"}, {"temperature": True},
    {"top_p": -0.1}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": 2}, {"typical_p": 1.1}, {"min_p": -1},
    {"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"repetition_penalty": 0},
    {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": "9"},
    {"n": 0}, {"n": 17}, {"n": True}, {"seed": 2**64}, {"seed": 1.5},
    {"stop": ["x"] * 17}, {"stop": ""}, {"stop": [1]}, {"stop": 1}, {"stop": "x" * 1001},
    {"logit_bias": {"x": 1}}, {"logit_bias": {"1": 101}}, {"logit_bias": {"999999": 1}}, {"logit_bias": {"9" * 5000: 1}},
    {"logit_bias": [1]}, {"logit_bias": {"-1": 1}},
    {"stop_token_ids": [-1]}, {"stop_token_ids": [999999]}, {"stop_token_ids": 5}, {"min_tokens": -1},
    {"stream": "yes"}, {"length_penalty": 0.5}, {"truncate_prompt_tokens": 0},
    {"allowed_token_ids": []}, {"bad_words": [""]}, {"ignore_eos": 1},
    {"store": 1}, {"service_tier": "gold"}, {"max_tokens": 5.5},
    {"metadata": {"a": 1}}, {"timeout": 0}, {"cache_salt": "x" * 257},
    {"suffix": "x"}, {"use_beam_search": True}, {"guided_json": 1}, {"guided_choice": []}, {"model": 5},
    {"structured_outputs": {"regex": "a", "json": {}}},
]  # fmt: skip
WRONG_CHAT: list[dict[str, Any]] = [
    {"messages": []}, {"messages": "hi"}, {"messages": [{}]}, {"messages": None}, {"messages": [{"role": "user"}]},
    user(5), user(None), user([IMAGE]), user([{"type": "text"}]), user(["x"]), user([{"type": "text", "text": 1}]),
    {"messages": [{"role": "alien", "content": "x"}]}, {"messages": [{"role": "tool"}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]},
    calls({"name": "f", "arguments": "{"}), calls({"name": "f", "arguments": "[]"}), calls({"arguments": "{}"}),
    calls({"name": "f", "arguments": "{}"}),
    {"top_logprobs": 2}, {"top_logprobs": 21, "logprobs": True}, {"logprobs": 1},
    {"response_format": {"type": "json_objekt"}}, {"response_format": {"type": "json_schema"}},
    {"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"tool_choice": {"type": "function"}},
    {"tools": [TOOL]}, {"tools": [TOOL, TOOL]}, {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
    {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, {"tools": [TOOL] * 513},
    {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, {"tool_choice": "maybe"},
    {"functions": [{"name": "f"}], "tools": [TOOL]}, {"functions": [{}]}, {"function_call": "required"},
    {"modalities": ["audio"]}, {"audio": {"voice": "x"}},
    {"reasoning_effort": "much"}, {"web_search_options": {"a": 1}},
    {"chat_template_kwargs": {"messages": []}}, {"continue_final_message": True}, {"max_completion_tokens": -1},
]  # fmt: skip
WRONG_COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": None}, {"prompt": 5}, {"prompt": ["a", 1]},
    {"prompt": [1, "a"]}, {"prompt": [[1], "a"]}, {"prompt": [-1]}, {"prompt": [True]}, {"prompt": [999999]},
    {"prompt": ["x"] * 65}, {"echo": True, "logprobs": 1, "prompt_logprobs": 1},
    {"best_of": 17}, {"best_of": 1, "n": 2}, {"best_of": 3, "stream": True},
    {"stream": True, "prompt_logprobs": 1}, {"logprobs": 21}, {"logprobs": True},
]  # fmt: skip
WRONG = [
    *((route, fields) for fields in WRONG_ON_BOTH for route in (CHAT, COMPLETIONS)),
    *((CHAT, fields) for fields in WRONG_CHAT),
    *((COMPLETIONS, fields) for fields in WRONG_COMPLETIONS),
]


@pytest.mark.parametrize(("route", "fields"), WRONG, ids=lambda value: json.dumps(value)[:50])
async def test_wrong_input_is_named(gateway: Gateway, route: str, fields: dict[str, Any]) -> None:
    response = await gateway.http.post(route, json=BODIES[route] | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] in fields
    assert error["param"] in error["message"] or error["param"] == "prompt" or "token" in error["message"]
    assert gateway.script.submitted == []


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model":"\xff"}', b'{"model":"\\ud800","messages":[]}',
        b'{"model":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model":"m","chat_template_kwargs":{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}}",
        b'{"model":"m","messages":[],"temperature":NaN}', b'{"model":"m","seed":' + b"9" * 10_000 + b"}",
    ],
    ids=lambda raw: repr(raw[:24]),
)  # fmt: skip
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_bytes_that_are_no_request(gateway: Gateway, route: str, raw: bytes) -> None:
    response = await gateway.http.post(route, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


async def test_a_body_that_is_too_large(gateway: Gateway) -> None:
    response = await gateway.http.post(CHAT, content=b" " * 200_001)
    assert response.status_code == 413
    assert response.json()["error"]["message"]


async def test_a_prompt_that_is_too_long(gateway: Gateway) -> None:
    for fields in ({"prompt": [5] * 256}, {"prompt": [5] * 250, "max_tokens": 7}):
        with pytest.raises(openai.BadRequestError) as raised:
            await gateway.openai.completions.create(model=MODEL, **fields)
        assert raised.value.code == "context_length_exceeded"


async def test_another_model(gateway: Gateway) -> None:
    for call in (
        gateway.openai.chat.completions.create(model="other", messages=MESSAGES),  # type: ignore[call-overload]
        gateway.openai.models.retrieve("org/other"),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            await call
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
