"""Formats of answers in /v1/models, and the log where calls can't be told from text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from tests.models import TOOL_TEMPLATE, TOOL_TOKENS, build_tokenizer
from tests.unit.gateway.conftest import MODEL, run_gateway

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
]
SHOWS_TOOLS = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"


async def test_the_models_list_says_how_calls_and_thoughts_are_written(tmp_path: Path) -> None:
    build_tokenizer(tmp_path, template=TOOL_TEMPLATE, added=TOOL_TOKENS)
    async with run_gateway(ChatTokenizer(tmp_path), HttpSettings()) as gateway:
        card = (await gateway.http.get("/v1/models")).json()["data"][0]
    assert (card["tool_call_format"], card["reasoning_format"]) == ("hermes", "think")


async def test_tools_of_a_model_whose_calls_come_as_text_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_tokenizer(tmp_path, template=SHOWS_TOOLS)
    async with run_gateway(ChatTokenizer(tmp_path), HttpSettings()) as gateway:
        card = (await gateway.http.get(f"/v1/models/{MODEL}")).json()
        assert (card["tool_call_format"], card["reasoning_format"]) == (None, None)
        for tools, times in (({}, 0), ({"tools": TOOLS}, 1), ({"tools": TOOLS}, 1)):
            messages: list[Any] = [{"role": "user", "content": "Hello"}]
            await gateway.openai.chat.completions.create(model=MODEL, messages=messages, **tools)
            assert caplog.text.count("they come as text") == times
