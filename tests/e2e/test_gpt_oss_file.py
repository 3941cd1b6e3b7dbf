"""A small gpt-oss as a GGUF file, experts in MXFP4: separate processes chat by the template inside, in harmony's words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.answers.tokenizer import ChatTokenizer
from tests.e2e.cluster import Cluster
from tests.gguf_files import write_gguf
from tests.models import build_tokenizer
from tests.reference import greedy_tokens
from tests.unit.engine.gguf.cases import GPT_OSS

pytestmark = pytest.mark.long

CONTROLS = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MESSAGES = [{"role": "user", "content": "What is the time where the hills are green? " * 4}]
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the file beside it stands for, as transformers reads it."""
    folder = GPT_OSS.build(tmp_path_factory.mktemp("model") / "tiny")
    build_tokenizer(folder, template=TEMPLATE, added=CONTROLS)
    _change(folder / "tokenizer.json", lambda fields: [token.update(special=True) for token in fields["added_tokens"]])
    _change(folder / "tokenizer_config.json", lambda fields: fields.update(eos_token="<|return|>"))
    write_gguf(folder, folder.with_suffix(".gguf"), kind={"": "F32", "_exps": "MXFP4"}, rounded=True)
    return folder


def _change(file: Path, change: Any) -> None:
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        Cluster(tmp_path_factory.mktemp("cluster"), model=folder.with_suffix(".gguf"), dtype="float32") as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as client,
    ):
        yield client


async def _chat(client: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    response = await client.post("/v1/chat/completions", json=body | options)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_a_chat_is_answered_as_by_the_folder(client: httpx.AsyncClient, folder: Path) -> None:
    prompt = ChatTokenizer(folder).encode_chat(MESSAGES)
    answer = await _chat(client, max_tokens=TOKENS, ignore_eos=True, return_token_ids=True)
    assert answer["usage"]["prompt_tokens"] == len(prompt) > GPT_OSS.fields["sliding_window"]
    assert answer["choices"][0]["token_ids"] == greedy_tokens(folder, [prompt], TOKENS)[0]


async def test_a_call_is_made_in_harmony(client: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": NOW}]
    answer = await _chat(client, tools=tools, tool_choice="required", thinking_token_budget=8, max_tokens=200)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    assert "<|" not in (choice["message"]["content"] or "")
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("now", {})]
