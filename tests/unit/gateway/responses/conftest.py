"""A gateway whose model thinks and calls tools, for the tests of the Responses API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from tests.fakes.generations import ScriptedGenerations
from tests.models import CALL_TEMPLATE, TOOL_TOKENS, build_tokenizer
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

PATH = "/v1/responses"
# History with its reasoning; `verbosity` and `reasoning_effort` show what reached the template.
TEMPLATE = CALL_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
).replace("{% if add_generation_prompt %}", "{{ verbosity }}{{ reasoning_effort }}{% if add_generation_prompt %}")
THOUGHT, ANSWER = "The sea is wide.", "It is blue. 🙂"
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
Json = dict[str, Any]


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("responses")
    build_tokenizer(folder, template=TEMPLATE, added=TOOL_TOKENS)
    return ChatTokenizer(folder)


@pytest.fixture(scope="module")
async def responding(thinker: ChatTokenizer) -> AsyncIterator[Gateway]:
    async with run_gateway(thinker, HttpSettings()) as gateway:
        yield gateway


@pytest.fixture
def gateway(responding: Gateway) -> Gateway:
    """The module's gateway with a fresh script, that says SAID."""
    vars(responding.script).update(vars(ScriptedGenerations(responding.script.script)))
    responding.script.max_model_len = 4096
    say(responding, SAID)
    return responding


def say(gateway: Gateway, text: str) -> None:
    """Let the model say a text."""
    ids = [*gateway.tokenizer.encode(text, add_special_tokens=False), *gateway.tokenizer.eos_ids]
    gateway.script.script = lambda spec: ids


def prompt(gateway: Gateway) -> str:
    return gateway.tokenizer.decode(gateway.script.submitted[-1].token_ids, skip_special_tokens=False)


async def post(gateway: Gateway, path: str = PATH, **fields: Any) -> Json:
    """What a POST answers, or AssertionError with the error."""
    answer = await gateway.http.post(path, json={"model": MODEL, "input": "Hello"} | fields)
    assert answer.status_code == 200, answer.text
    return dict(json.loads(answer.text))


async def stream(gateway: Gateway, **fields: Any) -> str:
    answer = await gateway.http.post(PATH, json={"model": MODEL, "input": "Hello", "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.text


def anonymous(output: list[Json]) -> list[Json]:
    """Items without the ids that each answer has of its own."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]
