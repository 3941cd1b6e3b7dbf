"""Anthropic's messages as templates take them, case by case."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.errors import InvalidRequestError
from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.http.fields import parse_body

HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
WEATHER = {"name": "get_weather", "input_schema": {"type": "object"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 8, "messages": [HELLO]} | fields


def read(**fields: Any) -> MessagesRequest:
    return parse_body(msgspec.json.encode(body(**fields)), MessagesRequest)


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | fields


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content} | fields


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")], "Be brief.\nBe kind."),
        ([text("x-anthropic-billing-header: cc_version=2.1; cch=a1b2;"), text("Be brief.")], "Be brief."),
        ("x-anthropic-billing-header: cc_version=2.1; cch=a1b2;\nBe brief.", "Be brief."),
    ],
)
def test_the_system_is_one_text_without_what_changes(system: Any, shown: str) -> None:
    assert read(system=system).conversation.messages == [{"role": "system", "content": shown}, HELLO]


@pytest.mark.parametrize("system", ["", [], None, [text("x-anthropic-billing-header: cch=a1b2;")]])
def test_a_system_that_says_nothing_is_no_message(system: Any) -> None:
    assert read(system=system).conversation.messages == [HELLO]


THOUGHT = {"type": "thinking", "thinking": "Rome, so", "signature": "any"}
SHOWN_THOUGHT = {"reasoning_content": "Rome, so", "thinking": "Rome, so"}
TOOL = {"role": "tool", "tool_call_id": "toolu_1", "name": "get_weather"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
USED = [HELLO, {"role": "assistant", "content": [USE]}]


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([{"role": "user", "content": [text("Hello"), text("there")]}], [{"role": "user", "content": "Hello\nthere"}]),
        ([HELLO, HELLO], [{"role": "user", "content": "Hello\nHello"}]),
        (
            [HELLO, {"role": "system", "content": [text("Be brief.")]}, HELLO],
            [HELLO, {"role": "system", "content": "Be brief."}, HELLO],
        ),
        (
            [HELLO, {"role": "assistant", "content": [THOUGHT, text("Hm."), USE]}, {"role": "user", "content": [result("sun")]}],
            [HELLO, {"role": "assistant", "content": "Hm.", "tool_calls": [CALL], **SHOWN_THOUGHT}, TOOL | {"content": "sun"}],
        ),
        (
            [
                HELLO,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [result([text("sun"), text("wind")]), text("And?")]},
            ],
            [
                HELLO,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                TOOL | {"content": "sun\nwind"},
                {"role": "user", "content": "And?"},
            ],
        ),
        (
            [HELLO, {"role": "assistant", "content": "One"}, {"role": "assistant", "content": [text(", two"), USE]},
             {"role": "user", "content": [result("no such city", is_error=True)]}],
            [HELLO, CALLED | {"content": "One, two"}, TOOL | {"content": "Error: no such city"}],
        ),
        (
            [*USED, {"role": "user", "content": [result("<tool_use_error>No.</tool_use_error>", is_error=True)]}],
            [HELLO, CALLED, TOOL | {"content": "<tool_use_error>No.</tool_use_error>"}],
        ),
        (
            [*USED, {"role": "user", "content": [result([{"type": "tool_reference", "tool_name": "get_weather"}])]}],
            [HELLO, CALLED, TOOL | {"content": "get_weather"}],
        ),
    ],
)  # fmt: skip
def test_messages_become_the_template_s(messages: list[Any], shown: list[Any]) -> None:
    conversation = read(messages=messages).conversation
    assert conversation.messages == shown
    assert conversation.opens_answer
    assert not conversation.continues_final_message


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    conversation = read(messages=[HELLO, {"role": "assistant", "content": "The best is ("}]).conversation
    assert (conversation.opens_answer, conversation.continues_final_message) == (False, True)
    empty = read(messages=[HELLO, {"role": "assistant", "content": []}]).conversation
    assert (empty.messages, empty.opens_answer) == ([HELLO], True)


@pytest.mark.parametrize(
    ("fields", "variables", "may_think", "budget", "shows"),
    [
        ({}, {}, True, None, True),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}, False, None, True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}, True, None, False),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking": True}, True, 1024, True,
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            {"reasoning_effort": "high"}, True, None, True,
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"enable_thinking": False, "thinking": False}, False, None, True,
        ),
    ],
)  # fmt: skip
def test_thinking_and_effort(
    fields: dict[str, Any], variables: dict[str, Any], may_think: bool, budget: int | None, shows: bool
) -> None:
    ask = Messages().ask(read(**fields))
    assert ask.prompts[0].variables == variables  # type: ignore[union-attr]
    assert ask.reply is not None
    assert (ask.reply.may_think, ask.reply.thinking_budget, ask.reply.shows_reasoning) == (may_think, budget, shows)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (False, True, 2, 2)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (False, False, 2, 2)),
        ({"type": "any"}, (True, True, 2, 2)),
        ({"type": "tool", "name": "get_weather"}, (True, False, 2, 1)),
        ({"type": "none"}, (False, True, 0, 0)),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[bool, bool, int, int]) -> None:
    rules = read(tools=[WEATHER, WEATHER | {"name": "other", "strict": True}], tool_choice=choice).tool_rules
    assert (rules.must_call, rules.parallel, len(rules.tools), len(rules.allowed)) == expected
    assert [tool.strict for tool in rules.tools] == [False, True][: len(rules.tools)]


def test_what_changes_nothing_is_taken_and_told_where_it_might_be_missed() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}
    deferred = WEATHER | {"defer_loading": True, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    silent = {
        "metadata": {"user_id": "user_1", "more": 1}, "service_tier": "auto", "cache_control": {"type": "ephemeral"},
        "diagnostics": {"previous_message_id": None},
    }  # fmt: skip
    made = read(tools=[search, deferred], context_management={"edits": []}, speed="fast", **silent)
    assert made.ignored == ("context_management", "speed", "tools.defer_loading")
    assert [tool.name for tool in made.tool_rules.tools] == ["get_weather"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?"),
        ({"max_tokens": None}, "max_tokens: this field is required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: Input should be 'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: this field is required"),
        ({"messages": USED}, "messages: the last tool_use needs its tool_result"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages: 0: a tool_use block can't be in a message of role user"),
        (
            {"messages": [{"role": "user", "content": [text("What is it?"), {"type": "image", "source": {}}]}]},
            "messages.0.content: 1: 'image' blocks are not supported: only text is read: remove it",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content: 0: 'document' blocks"),
        (
            {"messages": [*USED, {"role": "user", "content": [result([{"type": "image"}])]}]},
            "messages.2.content: 0: 'image' blocks are not supported",
        ),
        ({"system": [{"type": "image"}]}, "system: 0: 'image' blocks are not supported"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0.type: 'web_search_20250305' is not a tool of the client",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0: input_schema: a tool needs it"),
        ({"tools": [WEATHER, WEATHER]}, "tools: two have the same name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice: 'other' is not among the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools to call"),
        ({"tool_choice": "auto"}, "tool_choice: "),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: Input should be 'enabled', 'adaptive' or 'disabled'"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: nothing but the model runs here"),
        ({"container": "c"}, "container: nothing but the model runs here"),
        ({"thread": {"type": "create"}}, "thread: send the whole conversation in messages"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: at most 16 stop strings are allowed"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: this field is required"),
    ],
)  # fmt: skip
def test_what_can_t_be_honoured_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**fields)
    assert message in refused.value.message


def test_a_count_takes_a_whole_request() -> None:
    count = parse_body(msgspec.json.encode(body(stream=True, temperature=1, system="Be brief.")), CountTokensRequest)
    assert count.conversation.messages == [{"role": "system", "content": "Be brief."}, HELLO]
