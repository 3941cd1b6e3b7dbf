"""Tools over HTTP: into the prompt by the model's own template, and out of the answer as calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.answers.template import ChatTemplate
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from tests.fakes.generations import ScriptedGenerations
from tests.models import TOOL_TEMPLATE, TOOL_TOKENS, build_tokenizer
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="session")
def tool_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tools")
    build_tokenizer(folder, template=TOOL_TEMPLATE, added=TOOL_TOKENS)
    return ChatTokenizer(folder)


@pytest.fixture(scope="module")
async def tool_server(tool_tokenizer: ChatTokenizer) -> AsyncIterator[Gateway]:
    async with run_gateway(tool_tokenizer, HttpSettings()) as gateway:
        gateway.script.max_model_len = 4096
        yield gateway


@pytest.fixture
async def tooled(tool_server: Gateway) -> AsyncIterator[Gateway]:
    vars(tool_server.script).update(vars(ScriptedGenerations(tool_server.script.script)))
    tool_server.script.max_model_len = 4096
    usual = tool_server.script.script
    yield tool_server
    tool_server.script.script = usual


async def ask(gateway: Gateway, **options: Any) -> Any:
    return await gateway.openai.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | options))


def prompt(gateway: Gateway) -> str:
    return gateway.tokenizer.decode(gateway.script.submitted[-1].token_ids, skip_special_tokens=False)


# -- into the prompt ----------------------------------------------------------------------------------------------


async def test_tools_are_shown_by_the_models_own_template(tooled: Gateway) -> None:
    await ask(tooled, tools=TOOLS)
    assert json.loads(prompt(tooled).splitlines()[1]) == TOOLS[0]
    await ask(tooled, tools=TOOLS, tool_choice="none")
    assert "get_weather" not in prompt(tooled)


async def test_the_older_functions_are_tools(tooled: Gateway) -> None:
    await ask(tooled, functions=[WEATHER], function_call="auto")
    assert json.loads(prompt(tooled).splitlines()[1]) == TOOLS[0]
    await ask(tooled, functions=[WEATHER], function_call="none")
    assert "get_weather" not in prompt(tooled)


CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ({"tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}),
        ({"tool_calls": [CALL]}, {"role": "tool", "content": [{"type": "text", "text": "sunny"}]}),
        ({"function_call": CALL["function"]}, {"role": "function", "name": "get_weather", "content": "sunny"}),
        (
            {"tool_calls": [{"id": "a", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}]},
            {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        ),
    ],
)
async def test_calls_and_results_are_replayed(tooled: Gateway, call: dict[str, Any], result: dict[str, Any]) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": None, **call}, result]
    await ask(tooled, messages=messages, tools=TOOLS)
    shown = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
    assert shown + "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n" in prompt(tooled)


async def test_what_other_servers_put_into_messages_is_ignored(tooled: Gateway) -> None:
    answer = (await ask(tooled)).choices[0].message.model_dump()
    parts = [
        {"type": "text", "text": "And", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "?"},
    ]
    extra = {
        "provider_specific_fields": {"refusal": None}, "reasoning": None, "thinking_blocks": [], "id": 1, "opts": {},
        "reasoning_details": [{"a": 1}], "annotations": [{"b": 1}], "audio": {"id": "x"}, "tool_calls": [],
    }  # fmt: skip
    user = {"role": "user", "content": parts, "tool_call_id": "a", "refusal": "no"}
    await ask(tooled, messages=[*MESSAGES, answer | extra, user])
    assert prompt(tooled).endswith("<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")


async def test_unknown_nulls_are_absent_and_other_unknown_fields_refused(tooled: Gateway) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    assert (await tooled.http.post("/v1/chat/completions", json=body | {"extra": None})).status_code == 200
    refused = await tooled.http.post("/v1/chat/completions", json=body | {"temprature": 1})
    assert "unknown field 'temprature'" in refused.json()["error"]["message"]


async def test_a_template_without_tools_says_so(gateway: Gateway) -> None:
    for body in ({"tools": TOOLS}, {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}]}):
        response = await gateway.http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES} | body)
        assert response.status_code == 400
        assert "knows no tools" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == next(iter(body))


@pytest.mark.parametrize(
    "shown",
    [
        "{{ call.function.arguments | tojson }}",
        "{{ call.function.arguments }}",
        "{{ '' + call.function.arguments + '' }}",
        "{{ call.function.arguments ~ '' }}",
        "{% if call.function.arguments is string %}{% else %}{{ call.function.arguments | tojson }}{% endif %}",
    ],
)
def test_arguments_suit_every_template(shown: str) -> None:
    source = "{{ tools }}{% for call in messages[0].tool_calls %}" + shown + "{% endfor %}"
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": {"city": "Zürich"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert ChatTemplate(source, {}).render([message]) == 'None{"city": "Zürich"}'


def test_a_folder_may_have_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate("plain", {}, "tools: {{ tools }}{{ messages[0].tool_calls }}")
    assert template.render([{"role": "user", "content": "x"}]) == "plain"
    assert template.render([{"role": "user", "content": "x"}], tools=[{}]) == "tools: [{}]"
