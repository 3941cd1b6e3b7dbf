"""POST /v1/responses over HTTP: whole, streamed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from common.errors import OverloadedError, WorkerFailedError
from gateway.dialects.responses.schema import ResponseRequest
from gateway.http.fields import parse_body
from tests.unit.gateway.conftest import MODEL, Gateway
from tests.unit.gateway.responses.conftest import (
    ANSWER,
    CALLED,
    PATH,
    THOUGHT,
    Json,
    anonymous,
    post,
    prompt,
    say,
    stream,
)
from tests.unit.gateway.responses.wire import events_of, response_of, text_of

WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a place",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "Edit files"}
NAMESPACE: Json = {"type": "namespace", "name": "mcp", "description": "d", "tools": [{**WEATHER, "name": "look_up"}]}
ROME = [WEATHER]


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("plain", {}),
        (None, {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]}),
        (None, {"reasoning": {"summary": "auto"}}),
        (None, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (CALLED, {"tools": ROME}),
        (f"<think>\nHm\n</think>\n\nLet me see.\n{CALLED}\n{CALLED}", {"tools": ROME}),
        (
            '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** a\\n+ü\\n"}}\n</tool_call>',
            {"tools": [PATCH]},
        ),
        ('<tool_call>\n{"name": "mcp__look_up", "arguments": {"city": "x"}}\n</tool_call>', {"tools": [NAMESPACE]}),
        (None, {"max_output_tokens": 3}),
        ("long", {"max_output_tokens": 2, "text": {"format": {"type": "text"}, "verbosity": "low"}}),
        (None, {"instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0.5, "store": True, "user": "u"}),
    ],
)
@pytest.mark.parametrize("per_event", [1, 1_000])
async def test_a_stream_says_what_the_whole_answer_says(
    gateway: Gateway, said: str | None, fields: Json, per_event: int
) -> None:
    gateway.script.per_event = per_event
    if said is not None:
        say(gateway, said)
    whole = response_of(await post(gateway, **fields))
    events = events_of(await stream(gateway, **fields))
    last = events[-1]["response"]
    assert anonymous(last["output"]) == anonymous(whole["output"])
    differs = ("id", "output", "created_at", "completed_at")
    assert {name: value for name, value in last.items() if name not in differs} == {
        name: value for name, value in whole.items() if name not in differs
    }
    assert all(event["response"]["id"] == last["id"] for event in events if "response" in event)
    assert last["id"].startswith("resp_")


async def test_reasoning_and_text_are_items(gateway: Gateway) -> None:
    whole = await post(gateway)
    assert [(item["type"], text_of(item)) for item in whole["output"]] == [("reasoning", THOUGHT), ("message", ANSWER)]
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("per_event", [1, 2, 5, 1_000])
async def test_logprobs_are_those_of_the_text(gateway: Gateway, per_event: int) -> None:
    gateway.script.per_event = per_event
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = events_of(await stream(gateway, **asked))
    part = events[-1]["response"]["output"][1]["content"][0]
    assert b"".join(bytes(token["bytes"]) for token in part["logprobs"]).decode() == ANSWER
    assert {len(token["top_logprobs"]) for token in part["logprobs"]} == {1}
    assert [token for event in events if "delta" in event for token in event.get("logprobs", [])] == part["logprobs"]
    assert (await post(gateway, **asked))["output"][1]["content"][0] == part


HELLO = "<|im_start|>user\nHello<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
SHOWN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SEALED = "baton1.reasoning.SSB0aGluaw=="  # I think
USER = {"role": "user", "content": "Hello"}
PATCHED = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "+a"}}\n</tool_call>'


def texts(*said: str) -> list[Json]:
    return [{"type": "input_text", "text": one} for one in said]


@pytest.mark.parametrize(
    ("items", "shown"),
    [
        ([USER], HELLO),
        ([{"type": "message", "role": "user", "content": texts("Hel", "lo")}], HELLO),
        ([{"role": "developer", "content": "Be kind."}, USER], f"<|im_start|>system\nBe kind.<|im_end|>\n{HELLO}"),
        ([USER, {"role": "developer", "content": "Now."}], f"{HELLO}<|im_start|>system\nNow.<|im_end|>\n"),
        ([USER, {"role": "assistant", "content": "Hi"}, USER], f"{HELLO}{OPEN}Hi<|im_end|>\n{HELLO}"),
        (
            [USER, {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": "commentary",
                    "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}]}],
            f"{HELLO}{OPEN}Hi<|im_end|>\n",
        ),
        ([USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}], f"{HELLO}{OPEN}No<|im_end|>\n"),
        (
            [USER, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": SEALED},
             {"role": "assistant", "content": "Hi"}, CALL, {"type": "function_call_output", "call_id": "c1", "output": "sunny"}],
            f"{HELLO}{OPEN}<think>I think</think>Hi{SHOWN}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n",
        ),
        (
            [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}, CALL, CALL | {"call_id": "c2"},
             {"type": "function_call_output", "call_id": "c1", "output": texts("sun", "ny")}],
            f"{HELLO}{OPEN}<think>Hm</think>{SHOWN}{SHOWN}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n",
        ),
        (
            [{"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "+a"},
             {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}],
            f"{OPEN}{PATCHED}<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n",
        ),
        ([CALL | {"namespace": "mcp"}], f"{OPEN}{SHOWN.replace('get_weather', 'mcp__get_weather')}<|im_end|>\n"),
        (
            [{"type": "compaction", "encrypted_content": "baton1.compaction.QWxsIGRvbmU="}, USER],
            f"<|im_start|>user\nThe conversation up to here was shortened to this:\n\nAll done<|im_end|>\n{HELLO}",
        ),
    ],
)  # fmt: skip
async def test_items_are_the_template_s_messages(gateway: Gateway, items: list[Json], shown: str) -> None:
    await post(gateway, input=items)
    assert prompt(gateway) == shown + OPEN
    counted = await post(gateway, f"{PATH}/input_tokens", input=items)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": len(gateway.script.submitted[-1].token_ids),
    }


async def test_what_was_answered_comes_back_as_it_was_said(gateway: Gateway) -> None:
    say(gateway, f"<think>\nHm\n</think>\n\nLet me see.\n{CALLED}")
    first = await post(gateway, tools=ROME, include=["reasoning.encrypted_content"], store=False)
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sunny"}
    await post(gateway, input=[USER, *first["output"], result], tools=ROME)
    assert f"{OPEN}<think>Hm</think>Let me see.{SHOWN}<|im_end|>\n<|im_start|>tool\nsunny" in prompt(gateway)


async def test_instructions_and_words_for_the_template_are_heard(gateway: Gateway) -> None:
    await post(gateway, instructions="Be kind.", text={"verbosity": "high"}, reasoning={"effort": "low"})
    assert prompt(gateway) == f"<|im_start|>system\nBe kind.<|im_end|>\n{HELLO}highlow{OPEN}"
    spec = gateway.script.submitted[-1]
    await post(gateway, max_output_tokens=7, temperature=0.25, top_p=0.5, seed=3, top_k=4)
    spec = gateway.script.submitted[-1]
    asked = (
        spec.sampling.max_tokens,
        spec.sampling.temperature,
        spec.sampling.top_p,
        spec.sampling.seed,
        spec.sampling.top_k,
    )
    assert asked == (7, 0.25, 0.5, 3, 4)


async def test_an_input_that_is_too_long_is_cut_if_the_client_says_so(gateway: Gateway) -> None:
    gateway.script.max_model_len = 64
    long = "word " * 200
    refused = await gateway.http.post(PATH, json={"model": MODEL, "input": long})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    await post(gateway, input=long, truncation="auto", max_output_tokens=8)
    assert len(gateway.script.submitted[-1].token_ids) == 56


REFUSED: list[tuple[Json, int, str, str]] = [
    ({"input": None}, 400, "input", "required"),
    ({"input": []}, 400, "input", "required"),
    ({"input": 5}, 400, "input", "text or a list"),
    ({"input": [{"role": "robot", "content": "x"}]}, 400, "input", "role"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, 400, "input", "web_search_call"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        400,
        "input",
        "input_image",
    ),
    ({"input": [CALL | {"arguments": "no"}]}, 400, "input", "JSON object"),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]},
        400,
        "input",
        "leave the item out",
    ),
    ({"input": [{"type": "compaction", "encrypted_content": SEALED}]}, 400, "input", "leave the item out"),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "baton1.reasoning.???"}]},
        400,
        "input",
        "leave the item",
    ),
    ({"input": [{"id": "msg_1"}]}, 404, "input", "msg_1"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "input", "msg_1"),
    ({"previous_response_id": "resp_1"}, 404, "previous_response_id", "send the whole conversation"),
    ({"conversation": "conv_1"}, 404, "conversation", "send the whole conversation"),
    ({"conversation": "c", "previous_response_id": "r"}, 400, "previous_response_id", "not together"),
    ({"background": True}, 404, "background", "leave it out"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools", "web_search"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, 400, "tools", "mcp"),
    ({"tools": [WEATHER, WEATHER]}, 400, "tools", "same name"),
    ({"tools": [{"type": "function", "name": "no name"}]}, 400, "tools", "name"),
    ({"tool_choice": "required"}, 400, "tool_choice", "no tools"),
    ({"tools": ROME, "tool_choice": {"type": "function", "name": "other"}}, 400, "tool_choice", "other"),
    ({"tools": ROME, "tool_choice": {"type": "web_search_preview"}}, 400, "tool_choice", "web_search_preview"),
    ({"tools": ROME, "tool_choice": "sometimes"}, 400, "tool_choice", "must be"),
    ({"text": {"format": {"type": "xml"}}}, 400, "text", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text", "schema"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, 400, "guided_regex", "one of them"),
    ({"include": ["everything"]}, 400, "include", "everything"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "include"),
    ({"metadata": {"k" * 65: "v"}}, 400, "metadata", "64"),
    ({"metadata": dict.fromkeys(map(str, range(17)), "v")}, 400, "metadata", "16"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens", "1"),
    ({"max_output_tokens": 10_000}, 400, "max_output_tokens", "context length"),
    ({"max_tokens": 5}, 400, "max_tokens", "max_output_tokens"),
    ({"messages": [USER]}, 400, "messages", "use input"),
    ({"n": 2}, 400, "n", "one answer"),
    ({"prompt": {"id": "pmpt_1"}}, 400, "prompt", "not kept"),
    ({"context_management": [{"type": "compaction"}]}, 400, "context_management", "compact"),
    ({"truncation": "sometimes"}, 400, "truncation", "auto"),
    ({"model": "other"}, 404, "model", "does not exist"),
    ({"colour": "blue"}, 400, "colour", "unknown field"),
]


@pytest.mark.parametrize(("fields", "status", "param", "word"), REFUSED)
async def test_what_can_t_be_honoured_is_refused_by_name(
    gateway: Gateway, fields: Json, status: int, param: str, word: str
) -> None:
    answer = await gateway.http.post(PATH, json={"model": MODEL, "input": "Hello"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert word in error["message"]
    assert gateway.script.submitted == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "metadata": None, "reasoning": None, "text": None, "include": None},
        {"service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {
            "max_tool_calls": 3,
            "parallel_tool_calls": False,
            "store": False,
            "stream_options": {"include_obfuscation": False},
        },
        {"include": ["web_search_call.results"], "truncation": "disabled", "background": False, "moderation": None},
        {"reasoning": {"effort": "medium", "summary": None, "context": "auto", "generate_summary": None}},
    ],
)
async def test_what_changes_nothing_is_taken(gateway: Gateway, fields: Json) -> None:
    response_of(await post(gateway, **fields))


async def test_an_agent_s_searches_are_left_out_and_named(gateway: Gateway) -> None:
    search = [{"type": "web_search", "external_web_access": True}, {"type": "tool_search", "execution": "client"}]
    body = {"model": MODEL, "input": "Hello", "tools": [WEATHER, *search], "client_metadata": {"a": "b"}}
    answer = await gateway.http.post(PATH, json=body)
    assert answer.headers["x-baton-ignored-fields"] == "tools.web_search, tools.tool_search"
    assert [tool["type"] for tool in response_of(answer.json())["tools"]] == ["function"]


def test_a_gateway_that_ignores_unknown_fields_names_the_tools_it_leaves_out() -> None:
    body = {"model": MODEL, "input": "x", "tools": [{"type": "mcp", "server_label": "s"}, WEATHER], "colour": 1}
    read = parse_body(json.dumps(body).encode(), ResponseRequest, ignores_unknown=True)
    assert (set(read.ignored), list(read.called.called)) == ({"tools.mcp", "colour"}, ["get_weather"])


async def takes(gateway: Gateway, said: str, /, **fields: Any) -> bool:
    """Whether the answer's grammar lets the model say a text, and nothing behind it."""
    await post(gateway, **fields)
    grammar = gateway.script.submitted[-1].grammar
    assert grammar is not None
    library = LLTokenizer(gateway.tokenizer.tokenizer.to_str(), eos_token=gateway.tokenizer.eos_ids)
    matcher = LLMatcher(library, grammar.text, log_level=0)
    ids = gateway.tokenizer.encode(said, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


LOOKED_UP = CALLED.replace("get_weather", "mcp__look_up")
LOOK_UP = {"type": "function", "name": "look_up"}


def allowed(mode: str, *tools: Json) -> Json:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


@pytest.mark.parametrize(
    ("choice", "may"),
    [
        ("required", [True, True, True, False]),
        ({"type": "function", "name": "get_weather"}, [True, False, False, False]),
        ({"type": "custom", "name": "apply_patch"}, [False, True, False, False]),
        (LOOK_UP, [False, False, True, False]),
        (LOOK_UP | {"namespace": "mcp"}, [False, False, True, False]),
        (allowed("required", {"type": "custom", "name": "apply_patch"}, LOOK_UP), [False, True, True, False]),
        (allowed("auto", {"type": "function", "name": "get_weather"}), [True, False, False, True]),
    ],
)  # fmt: skip
async def test_a_choice_binds_the_answer(gateway: Gateway, choice: Any, may: list[bool]) -> None:
    tools = [WEATHER, PATCH, NAMESPACE]
    found = [
        await takes(gateway, text, tools=tools, tool_choice=choice) for text in (CALLED, PATCHED, LOOKED_UP, ANSWER)
    ]
    assert found == may


async def test_a_custom_tool_s_grammar_is_shown_and_an_expression_enforced(gateway: Gateway) -> None:
    words = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": r"[a-z]+\n|\+a"}}
    fields = {"tools": [words], "tool_choice": "required"}
    for written, may in (("+a", True), (r"ab\n", True), ("+b", False), ("+a+a", False)):
        assert await takes(gateway, PATCHED.replace("+a", written), **fields) is may
    lark = PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+/"}}
    await post(gateway, tools=[lark])
    assert "must follow this lark grammar" in prompt(gateway)
    wrong = {"format": {"type": "grammar", "syntax": "regex", "definition": "("}}
    refused = await gateway.http.post(PATH, json={"model": MODEL, "input": "x", **fields, "tools": [PATCH | wrong]})
    assert refused.status_code == 400


async def test_no_tools_are_shown_if_none_may_be_called(gateway: Gateway) -> None:
    await post(gateway, tools=[WEATHER, NAMESPACE], tool_choice="none")
    assert "get_weather" not in prompt(gateway)
    await post(gateway, tools=[WEATHER, NAMESPACE])
    assert '"name": "mcp__look_up"' in prompt(gateway)


async def test_the_text_s_format_is_followed(gateway: Gateway) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    strict = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert await takes(gateway, '{"a": 1}', text={"format": strict})
    assert not await takes(gateway, '{"b": 1}', text={"format": strict})
    assert await takes(gateway, '{"b": 1}', text={"format": {"type": "json_object"}})
    assert (await post(gateway, text={"format": strict}))["text"]["format"] == strict


# -- failures, keys, batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [WorkerFailedError("broke"), ZeroDivisionError("a bug")], ids=["ours", "a bug"])
async def test_a_stream_that_fails_says_so_twice(gateway: Gateway, error: Exception) -> None:
    gateway.script.fail, gateway.script.fail_after = error, 6
    events = events_of(await stream(gateway))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert gateway.script.running == {}
    whole = await gateway.http.post(PATH, json={"model": MODEL, "input": "Hello"})
    assert whole.status_code == 500


async def test_a_refusal_before_the_stream_is_an_error_of_http(gateway: Gateway) -> None:
    gateway.script.refuse = OverloadedError("full", retry_after_s=7)
    answer = await gateway.http.post(PATH, json={"model": MODEL, "input": "Hello", "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


async def test_paths_below_have_the_dialect_s_errors(gateway: Gateway) -> None:
    for method, path in (("GET", f"{PATH}/resp_1/nothing"), ("PUT", PATH)):
        answer = await gateway.http.request(method, path)
        assert (answer.status_code in (404, 405), answer.json().keys()) == (True, {"error"})


# -- compaction ----------------------------------------------------------------------------------------------------


async def test_a_conversation_is_shortened_by_the_model_itself(gateway: Gateway) -> None:
    items = [USER, {"role": "assistant", "content": "Hi"}]
    say(gateway, "<think>\nHm\n</think>\n\nThey said hello.")
    whole = await post(gateway, f"{PATH}/compact", input=items, instructions="Be kind.")
    assert whole["object"] == "response.compaction"
    assert [item["type"] for item in whole["output"]] == ["message", "compaction"]
    assert "goes on with it" in prompt(gateway).split("<|im_start|>user")[-1]
    triggered = events_of(await stream(gateway, input=[*items, {"type": "compaction_trigger"}]))[-1]["response"]
    assert [item["encrypted_content"] for item in triggered["output"]] == [whole["output"][1]["encrypted_content"]]
    say(gateway, ANSWER)
    await post(gateway, input=[*whole["output"], USER])
    assert f"{HELLO}<|im_start|>user\nThe conversation up to here was shortened" in prompt(gateway)
    assert "They said hello." in prompt(gateway)


# -- OpenAI's own client -------------------------------------------------------------------------------------------


class Sea(BaseModel):
    colour: str


async def test_openai_s_client_reads_it(gateway: Gateway) -> None:
    client = gateway.openai.responses
    assert (await client.create(model=MODEL, input="Hello")).output_text == ANSWER
    async with client.stream(model=MODEL, input="Hello") as events:
        kinds = [event.type async for event in events]
        final = await events.get_final_response()
    assert (final.output_text, kinds[-1]) == (ANSWER, "response.completed")
    say(gateway, '{"colour": "blue"}')
    parsed = await client.parse(model=MODEL, input="Hello", text_format=Sea)
    assert parsed.output_parsed == Sea(colour="blue")
    say(gateway, CALLED)
    tools: list[Any] = [
        WEATHER | {"strict": True, "parameters": WEATHER["parameters"] | {"additionalProperties": False}}
    ]
    async with client.stream(model=MODEL, input="Hello", tools=tools) as calling:
        called = (await calling.get_final_response()).output[0]
    assert called.type == "function_call"
    assert json.loads(called.arguments) == {"city": "Rome"}
    assert (await client.input_tokens.count(model=MODEL, input="Hello")).input_tokens > 0
