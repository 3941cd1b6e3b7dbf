"""openai-python's AzureOpenAI: deployments in the path, the key in `api-key`, a model's name that differs."""

from __future__ import annotations

from typing import Any

import openai
from cases import BASE_URL, MODEL, case, run

URL = BASE_URL.removesuffix("/v1")
VERSION = "2025-04-01-preview"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@case("chat, whole and streamed")
def chat() -> None:
    client = openai.AzureOpenAI(azure_endpoint=URL, api_version=VERSION, api_key="none", max_retries=0)
    ask: Any = client.chat.completions.create
    whole = ask(model=MODEL, messages=QUESTION, temperature=0).choices[0].message.content
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(model=MODEL, messages=QUESTION, temperature=0, stream=True)
    ]
    assert "Paris" in whole
    assert "".join(parts) == whole
    assert MODEL in [model.id for model in client.models.list()]


@case("a deployment of its own, an alias")
def deployment() -> None:
    client = openai.AzureOpenAI(azure_endpoint=URL, azure_deployment="gpt-4o", api_version=VERSION, api_key="none")
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=QUESTION, temperature=0)
    assert answer.model == "gpt-4o"
    assert "Paris" in (answer.choices[0].message.content or "")
    completion = client.completions.create(model="gpt-4o-mini", prompt="The capital of France is", max_tokens=4)
    assert completion.choices[0].finish_reason in ("length", "stop")


@case("the base URL /openai/v1/")
def newer() -> None:
    client = openai.OpenAI(base_url=f"{URL}/openai/v1/", api_key="none")
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")


run()
