"""Azure's paths of OpenAI's API, and SageMaker's contract with containers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.http.application import served_path
from gateway.tenants.tenants import Tenants
from tests.unit.gateway.conftest import MODEL, TEXT, Gateway, run_gateway

KEY = "key-of-sixteen-characters"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT = f"/openai/deployments/{MODEL}/chat/completions"


def azure(gateway: Gateway, **options: Any) -> openai.AsyncAzureOpenAI:
    return openai.AsyncAzureOpenAI(
        azure_endpoint=gateway.url, api_version="2025-04-01-preview", api_key=KEY, max_retries=0, **options
    )


async def test_azure_s_client_is_served_by_deployment(gateway: Gateway) -> None:
    async with azure(gateway) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
        stream = await client.completions.create(model=MODEL, prompt="Hello", stream=True)
        texts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
        assert (whole.choices[0].message.content, "".join(texts)) == (TEXT, TEXT)
        assert [model.id async for model in await client.models.list()] == [MODEL]
    async with azure(gateway, azure_deployment=MODEL) as client:  # `model` is then whatever one calls it
        assert (await client.chat.completions.create(model="gpt-4o", messages=HELLO)).model == MODEL


async def test_azure_s_newer_base_url_is_openai_s(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/openai/v1/", api_key="none") as client:
        assert (await client.chat.completions.create(model=MODEL, messages=HELLO)).choices[0].message.content == TEXT
        assert (await client.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize(
    ("path", "served"),
    [
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/models", "/v1/models"),
        (CHAT + "/", CHAT),
        ("/openai", "/openai"),
        ("/openaix/v1", "/openaix/v1"),
        ("/", "/"),
        ("/v1/models//", "/v1/models"),
    ],
)
def test_paths_have_one_form(path: str, served: str) -> None:
    assert served_path(path) == served


async def test_deployments_need_a_key_and_a_served_model(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings(tenants=Tenants(api_keys=(KEY,)))) as gateway:
        body = {"messages": HELLO}
        assert (await gateway.http.post(CHAT, json=body)).status_code == 401
        assert (await gateway.http.get("/openai/models")).status_code == 401
        assert (await gateway.http.get("/ping")).status_code == 200
        gateway.http.headers["api-key"] = KEY
        assert (await gateway.http.post(CHAT, json=body)).status_code == 200
        unknown = await gateway.http.post(CHAT.replace(MODEL, "other"), json=body)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        wrong = await gateway.http.post(CHAT, json=body | {"top_q": 1})
        assert wrong.json()["error"]["param"] == "top_q"


async def invoke(gateway: Gateway, **body: Any) -> Any:
    return await gateway.http.post(
        "/invocations", json=body, headers={"x-amzn-sagemaker-custom-attributes": "accept_eula=true"}
    )


async def test_an_invocation_is_answered_as_its_body_asks(gateway: Gateway) -> None:
    chat = (await invoke(gateway, messages=HELLO)).json()
    assert (chat["object"], chat["model"], chat["choices"][0]["message"]["content"]) == ("chat.completion", MODEL, TEXT)
    completion = (await invoke(gateway, prompt="Hello", model=MODEL)).json()
    assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", TEXT)
    assert (await invoke(gateway, inputs="Hello", parameters={"max_new_tokens": 100})).json() == [
        {"generated_text": f"Hello{TEXT}"}
    ]


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({"messages": HELLO}, "data: [DONE]"),
        ({"prompt": "Hello"}, "data: [DONE]"),
        ({"inputs": "Hello"}, '"finish_reason":"eos_token"'),
    ],
    ids=["messages", "prompt", "inputs"],
)
async def test_invocations_are_streamed(gateway: Gateway, body: dict[str, Any], end: str) -> None:
    answer = await invoke(gateway, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert end in answer.text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, None, "one of messages, prompt and inputs"),
        ({"messages": []}, "messages", "messages: "),
        ({"messages": HELLO, "temperature": 3}, "temperature", "temperature: "),
        ({"prompt": "x", "top_q": 1}, "top_q", "unknown field 'top_q'"),
        ({"inputs": "x", "parameters": {"watermark": True}}, "parameters", "watermark: not supported"),
    ],
    ids=str,
)
async def test_a_wrong_invocation_names_the_field(
    gateway: Gateway, body: dict[str, Any], param: str | None, told: str
) -> None:
    answer = await invoke(gateway, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert told in error["message"]


async def test_what_is_ignored_is_named(gateway: Gateway) -> None:
    answer = await invoke(gateway, messages=HELLO, keep_alive="5m")
    assert answer.headers["x-baton-ignored-fields"] == "keep_alive"


async def test_ping_says_whether_requests_are_served(gateway: Gateway) -> None:
    ready = await gateway.http.get("/ping")
    assert (ready.status_code, ready.content) == (200, b"")
    gateway.script.not_ready_reason = "no decode worker is ready"
    assert (await gateway.http.get("/ping")).status_code == 503
