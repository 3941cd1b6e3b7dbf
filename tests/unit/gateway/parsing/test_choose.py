"""The format is found by the model's own files."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.parsing.choose import CALLS, REASONINGS, Parsers, choose
from tests.unit.gateway.parsing.families import SHOWN, Shown, format_of
from tests.unit.gateway.parsing.formats import Said, parse, said_of

TEMPLATES = {
    "<tool_call>{{ call | tojson }}</tool_call>": "hermes",
    "<tool_call><function={{ name }}><parameter={{ key }}></tool_call><think>": "qwen3_coder+think",
    "[TOOL_CALLS]{{ name }}[ARGS]": "mistral",
    "[TOOL_CALLS][": "mistral_list",
    "<|start|><|channel|>final<|message|>": "harmony+harmony",
    "<tool_call>{{ name }}<arg_key></think>": "glm+think",
    "{{ '<｜tool▁call▁begin｜>' }}```json": "deepseek_v3",
    "{{ '<｜tool▁call▁begin｜>' }}<think>": "deepseek_v31+think",
    "<|python_tag|>": "llama3_json",
    "<think>": "think",
    "{{ content }}": "",
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_a_template_shows_its_format(template: str, name: str) -> None:
    found = choose(template, {}).format
    assert "+".join(filter(None, (found.name, found.reasoning))) == name


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.models)
def test_a_published_model_s_format_is_told(shown: Shown) -> None:
    assert format_of(shown) == (shown.calls, shown.reasoning)


def test_every_format_is_some_model_s() -> None:
    assert {shown.calls for shown in SHOWN} == {*CALLS}
    assert {shown.reasoning for shown in SHOWN} >= {*REASONINGS} - {"deepseek_r1"}


def test_a_name_is_taken_before_what_the_files_say() -> None:
    found = choose("<tool_call>", {}, response_template=GEMMA, parsers=Parsers("pythonic", "deepseek_r1"))
    assert (found.format.name, found.format.reasoning) == ("pythonic", "deepseek_r1")
    assert choose("<tool_call><think>", {}, parsers=Parsers("none", "none")).format.name == ""
    named = choose("", {}, parsers=Parsers("glm45", "qwen3")).format
    assert (named.name, named.reasoning) == ("glm", "think")
    with pytest.raises(
        ValueError, match="'hermse' is no parser, did you mean 'hermes'\\? choose auto, none or one of hermes"
    ):
        Parsers("hermse")


GEMMA: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n"],
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": ["<turn|>"], "content": "text"},
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
GEMMA_MARKS = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')


def field(**entry: Any) -> dict[str, Any]:
    thinking = {"open": "<think>", "close": "</think>", "content": "text"}
    return {"start_anchor": "x", "fields": {"thinking": thinking, "content": {}, "tool_calls": entry}}


FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
READ: dict[str, tuple[dict[str, Any], str, tuple[str, ...], Said]] = {
    "gemma": (
        GEMMA, '<|channel>thought\nHm<channel|>Ok<|tool_call>call:weather{city:<|"|>a"b<|"|>,days:3}<tool_call|><turn|>', GEMMA_MARKS,
        Said("Ok", "Hm", [("weather", {"city": 'a"b', "days": 3})]),
    ),
    "json": (
        field(open="<tool_call>", close="</tool_call>", content="json", transform={"type": "function", "function": "{content}"}),
        '<think>Hm</think>Ok <tool_call>{"name": "weather", "arguments": {"days": 3}}</tool_call>', ("<tool_call>",),
        Said("Ok", "Hm", [("weather", {"days": 3})]),
    ),
    "a list": (
        field(
            open="[C]", close="[/C]", content="json", transform_each=True,
            transform={"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        ),
        '[C][{"name": "weather", "arguments": {"days": 3}}, {"name": "now", "arguments": {}}][/C]', (),
        Said("", "", [("weather", {"days": 3}), ("now", {})]),
    ),
    "another shape": (
        field(
            open="[C]", close="[/C]", content="json",
            transform={"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.with}"}},
        ),
        '[C]{"tool": "weather", "with": {"days": "3", "city": "4"}}[/C]', (), Said("", "", [("weather", {"days": 3, "city": "4"})]),
    ),
    "tags": (
        field(
            open_pattern=r"<tool_call>\s*<function=(?P<name>\w+)>", close="</tool_call>", repeats=True, content="xml-inline",
            content_args={
                "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            transform=FUNCTION,
        ),
        "A <tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call> B", ("<tool_call>", "</tool_call>"), Said("A B", "", [("weather", {"city": "Rome", "days": 3})]),
    ),
    "lines": (
        field(open_pattern=r"CALL (?P<name>\w+):\n", close="END", content="kv-lines", transform=FUNCTION),
        "CALL weather:\ncity: Rome\ndays: 3\nEND", (), Said("", "", [("weather", {"city": "Rome", "days": 3})]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("cuts", [None, [1], [5, 2]], ids=["whole", "1", "5, 2"])
def test_a_response_template_is_read(name: str, cuts: list[int] | None) -> None:
    template, text, marks, said = READ[name]
    vocabulary = {mark: 1_000 + index for index, mark in enumerate(marks)}
    found = choose("<tool_call>", vocabulary, response_template=template)
    assert found.format.name == "response_template"
    assert said_of(parse(found, text, vocabulary, cuts=cuts)) == said


@pytest.mark.parametrize(
    "template",
    [
        {}, {"fields": {}}, {"fields": {"a": {}, "b": {}}}, {"version": 2, "fields": {"content": {}}}, [], "x",
        {"fields": {"content": {"content": "yaml"}}}, field(open_pattern="(", content="text"), field(open=5),
    ],
)  # fmt: skip
def test_a_response_template_that_can_t_be_read_gives_way_to_a_built_in(
    template: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose("<tool_call>", {}, response_template=template).format.name == "hermes"
    assert "a built-in format is used" in caplog.text
