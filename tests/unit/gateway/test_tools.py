"""Tools over HTTP: into the prompt by the model's own template, and out of the answer as calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.templates.template import ChatTemplate
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


# -- out of the answer --------------------------------------------------------------------------------------------

TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
ARGUMENTS = [{"city": "Zürich", "days": 3}, {"city": "Rome"}]


def say(gateway: Gateway, text: str) -> int:
    """Let the model answer with a text; its number of tokens."""
    ids = gateway.tokenizer.encode(text, add_special_tokens=False)
    gateway.script.script = lambda spec: [*ids, *gateway.tokenizer.eos_ids]
    return len(ids)


async def answered(gateway: Gateway, *, stream: bool, **options: Any) -> tuple[dict[str, Any], str, Any]:
    """The message, finish reason and usage, streamed or not, as openai's client reads them."""
    if not stream:
        whole = await ask(gateway, **options)
        return whole.choices[0].message.model_dump(exclude_none=True), whole.choices[0].finish_reason, whole.usage
    message: dict[str, Any] = {}
    finish, usage = "", None
    async for chunk in await ask(gateway, stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            delta = choice.delta.model_dump(exclude_none=True)
            for call in delta.pop("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert call["id"]
                    assert call["function"]["name"]
                    calls.append({"id": call["id"], "type": call["type"], "function": {"arguments": ""}})
                    calls[-1]["function"]["name"] = call["function"]["name"]
                else:
                    assert "id" not in call
                    assert "name" not in call["function"]
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            older = delta.pop("function_call", None)
            if older:
                known = message.setdefault("function_call", {"arguments": ""})
                known |= {
                    "name": older.get("name") or known["name"],
                    "arguments": known["arguments"] + older["arguments"],
                }
            for name, text in delta.items():
                message[name] = message.get(name, "") + text if name != "role" else text
    return message, finish, usage


both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@both_ways
@pytest.mark.parametrize("per_event", [1, 4, 100])
async def test_calls_are_told_from_content(tooled: Gateway, stream: bool, per_event: int) -> None:
    tooled.script.per_event = per_event
    count = say(tooled, TWO_CALLS)
    message, finish, usage = await answered(tooled, stream=stream, tools=TOOLS)
    assert (message["content"], finish) == ("Let me see.", "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"] * 2
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == ARGUMENTS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert usage.completion_tokens == count + 1


async def test_arguments_are_streamed_as_they_come(tooled: Gateway) -> None:
    say(tooled, TWO_CALLS)
    pieces = [
        call.function.arguments
        async for chunk in await ask(tooled, stream=True, tools=TOOLS)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert len(pieces) > 10


@both_ways
async def test_an_answer_of_calls_alone_has_no_content(tooled: Gateway, stream: bool) -> None:
    say(tooled, TWO_CALLS.partition("\n")[2])
    message, _, _ = await answered(tooled, stream=stream, tools=TOOLS, parallel_tool_calls=False)
    assert not message.get("content")
    assert len(message["tool_calls"]) == 1


@both_ways
async def test_who_asks_for_functions_is_answered_so(tooled: Gateway, stream: bool) -> None:
    say(tooled, TWO_CALLS)
    message, finish, _ = await answered(tooled, stream=stream, functions=[WEATHER])
    assert finish == "function_call"
    assert json.loads(message["function_call"]["arguments"]) == ARGUMENTS[0]
    assert "tool_calls" not in message


@both_ways
async def test_without_tools_nothing_is_a_call(tooled: Gateway, stream: bool) -> None:
    say(tooled, TWO_CALLS)
    message, finish, _ = await answered(tooled, stream=stream)
    assert (message["content"], finish) == (TWO_CALLS, "stop")


@both_ways
async def test_a_call_that_was_cut_says_so(tooled: Gateway, stream: bool) -> None:
    count = say(tooled, TWO_CALLS)
    message, finish, _ = await answered(tooled, stream=stream, tools=TOOLS, max_tokens=count - 8)
    assert finish == "length"
    assert tooled.script.called == []  # nobody comes back with its result
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS[0]
    with pytest.raises(ValueError):
        json.loads(message["tool_calls"][1]["function"]["arguments"])


THOUGHT = "<think>\nRome, or\n\nParis?\n</think>\n\nParis."


@both_ways
async def test_reasoning_is_told_from_content(tooled: Gateway, stream: bool) -> None:
    say(tooled, THOUGHT)
    message, finish, usage = await answered(tooled, stream=stream)
    assert (message["content"], finish) == ("Paris.", "stop")
    assert message["reasoning"] == message["reasoning_content"] == "Rome, or\n\nParis?"
    thought = len(tooled.tokenizer.encode(THOUGHT.partition("\n\nP")[0], add_special_tokens=False))
    assert 8 < usage.completion_tokens_details.reasoning_tokens <= thought + 20 < usage.completion_tokens + 20
    hidden, _, _ = await answered(tooled, stream=stream, extra_body={"include_reasoning": False})
    assert hidden.keys() == {"role", "content"}


async def test_reasoning_goes_back_with_the_message(tooled: Gateway) -> None:
    say(tooled, THOUGHT)
    answer = (await ask(tooled)).choices[0].message.model_dump()
    await ask(tooled, messages=[*MESSAGES, answer, *MESSAGES])
    assert "Paris." in prompt(tooled)


async def test_an_effort_of_none_turns_thinking_off(tooled: Gateway) -> None:
    await ask(tooled, reasoning_effort="none")
    assert prompt(tooled).endswith("<think>\n\n</think>\n\n")
    await ask(tooled, reasoning_effort="high")
    assert "<think>" not in prompt(tooled)
    await ask(tooled, reasoning_effort="high", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert prompt(tooled).endswith("<think>\n\n</think>\n\n")


@both_ways
async def test_stop_strings_are_looked_for_in_content_alone(tooled: Gateway, stream: bool) -> None:
    say(tooled, "<think>\nstop\n</think>\nGo on, stop, go")
    message, finish, _ = await answered(tooled, stream=stream, stop="stop")
    assert (message["reasoning"], message["content"], finish) == ("stop", "Go on, ", "stop")
    say(tooled, TWO_CALLS)
    message, finish, _ = await answered(tooled, stream=stream, tools=TOOLS, stop="Rome")
    assert (len(message["tool_calls"]), finish) == (2, "tool_calls")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("foo\n\n\n\n\n\n", {"stop": "\n\n"}),
        ("foo\n\nbar baz", {"stop": "\n\n"}),
        ("foo\nbar baz", {"stop": "\n", "min_tokens": 4}),
        ("foo\n\nbar\nbaz", {"stop": "\n", "min_tokens": 4, "include_stop_str_in_output": True}),
        ("foo\n", {"stop": "\n\n"}),
        ("foo \n b\n\n c", {"stop": ["\n\n", " \n \n"]}),
        ("\n\nfoo \n", {"stop": "\n"}),
    ],
)
async def test_space_ends_content_where_it_ends_a_completion(
    text: str, options: dict[str, Any], tooled: Gateway
) -> None:
    say(tooled, text)
    message, finish, usage = await answered(tooled, stream=False, extra_body=options)
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 30} | options
    known = (await tooled.http.post("/v1/completions", json=body)).json()
    assert message["content"] == known["choices"][0]["text"]
    assert finish == known["choices"][0]["finish_reason"]
    assert text.startswith("\n") or usage.completion_tokens == known["usage"]["completion_tokens"]


async def test_choices_and_batches_of_calls_are_told_apart(tooled: Gateway) -> None:
    say(tooled, TWO_CALLS)
    whole = await ask(tooled, tools=TOOLS, n=3)
    calls = [choice.message.tool_calls for choice in whole.choices]
    assert [len(made) for made in calls] == [2, 2, 2]
    assert len({call.id for made in calls for call in made}) == 6


# -- enforced -----------------------------------------------------------------------------------------------------

STRICT: list[Any] = [{"type": "function", "function": WEATHER | {"strict": True}}]
OTHER: list[Any] = [*TOOLS, {"type": "function", "function": {"name": "other"}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def follows(gateway: Gateway, text: str) -> bool:
    """Whether the last request's grammar takes a text, from where the prompt left off."""
    grammar = gateway.script.submitted[-1].grammar
    assert grammar is not None
    tokenizer = gateway.tokenizer.tokenizer
    library = LLTokenizer(tokenizer.to_str(), eos_token=gateway.tokenizer.eos_ids)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if grammar.after is not None:
        ids = ids[ids.index(grammar.after[-1]) + 1 :]
    matcher = LLMatcher(library, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


CALL_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER_TEXT = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
TWICE = f"{CALL_TEXT}\n{CALL_TEXT}"


@pytest.mark.parametrize(
    ("options", "takes", "refuses"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, [CALL_TEXT, TWICE, f"<think>\nHm\n</think>\n\n{CALL_TEXT}"], ["Hello"]),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, [CALL_TEXT], [TWICE]),
        ({"tools": OTHER, "tool_choice": NAMED}, [CALL_TEXT], [OTHER_TEXT, TWICE, "Hello"]),
        ({"functions": [WEATHER], "function_call": {"name": "get_weather"}}, [CALL_TEXT], ["Hello"]),
        ({"tools": STRICT}, ["Hello", f"Well. {CALL_TEXT}"], [f"Well. {OTHER_TEXT}", "<tool_call>no"]),
        (
            {"tools": OTHER, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            ["Hello", CALL_TEXT], [OTHER_TEXT],
        ),
        (
            {"tools": OTHER, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
            [CALL_TEXT, TWICE], [OTHER_TEXT, "Hello"],
        ),
    ],
)  # fmt: skip
async def test_what_must_be_called_is_a_grammar(
    tooled: Gateway, options: dict[str, Any], takes: list[str], refuses: list[str]
) -> None:
    await ask(tooled, extra_body=options)
    assert [text for text in takes if not follows(tooled, text)] == []
    assert [text for text in refuses if follows(tooled, text)] == []


async def test_tools_that_may_be_called_as_the_model_likes_need_no_grammar(tooled: Gateway) -> None:
    for options in ({"tools": TOOLS}, {"tools": STRICT, "tool_choice": "none"}, {}):
        await ask(tooled, **options)
        assert tooled.script.submitted[-1].grammar is None


async def test_behind_reasoning_that_the_prompt_opened_a_grammar_begins_later(tooled: Gateway) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nHm"}]
    options = {"continue_final_message": True, "parse_special": True, "thinking_token_budget": 7}
    await ask(tooled, messages=messages, tools=TOOLS, tool_choice="required", extra_body=options)
    grammar = tooled.script.submitted[-1].grammar
    assert grammar is not None
    assert grammar.after == tooled.tokenizer.encode("</think>", add_special_tokens=False)
    assert grammar.budget == 7
    assert follows(tooled, f"so.</think>{CALL_TEXT}")


@pytest.mark.parametrize("name", ["thinking_token_budget", "max_thinking_tokens", "thinking_budget"])
async def test_reasoning_has_a_budget(tooled: Gateway, name: str) -> None:
    await ask(tooled, extra_body={name: 4})
    assert follows(tooled, "<think>\nHm</think>\n\nYes, <tool_call>.")
    assert not follows(tooled, "<think>\nHm, so it is, and so will it be.</think>\n\nYes.")
    assert follows(tooled, "Yes.")
    await ask(tooled, extra_body={name: -1})
    assert tooled.script.submitted[-1].grammar is None
    await ask(tooled, reasoning_effort="none", extra_body={name: 4})
    assert tooled.script.submitted[-1].grammar is None


async def test_a_schema_that_can_t_be_enforced_is_named(tooled: Gateway) -> None:
    wrong = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "nonsense"}}}
    for choice, param in (("required", "tool_choice"), ("auto", "tools")):
        body = {"model": MODEL, "messages": MESSAGES, "tools": [wrong], "tool_choice": choice}
        error = (await tooled.http.post("/v1/chat/completions", json=body)).json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_request")


async def test_a_grammar_for_content_begins_behind_the_reasoning_and_lets_tools_be_called(tooled: Gateway) -> None:
    wanted = {"response_format": {"type": "json_object"}}
    await ask(tooled, **wanted)
    for text in ("{}", "<think>\nHm</think>\n\n{}"):
        assert follows(tooled, text)
    for text in ("Hello", "<think>\nHm</think>Hello", CALL_TEXT):
        assert not follows(tooled, text)
    await ask(tooled, **wanted, tools=TOOLS)
    for text in ("{}", CALL_TEXT, f"<think>\nHm</think>\n\n{CALL_TEXT}"):
        assert follows(tooled, text)
    assert not follows(tooled, "Hello")
    await ask(tooled, **wanted, reasoning_effort="none")
    assert follows(tooled, "{}")
    assert not follows(tooled, "<think>\nHm</think>\n\n{}")
