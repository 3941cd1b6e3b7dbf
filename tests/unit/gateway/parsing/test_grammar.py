"""What a grammar lets a model write is what the parser reads, for every format."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gateway.parsing.choose import CALLS, Parsers, choose
from gateway.parsing.format import Wire
from gateway.parsing.grammar import CallShape, Shape, message_grammar, with_body
from gateway.parsing.terminals import Bound
from tests.models import build_tokenizer
from tests.unit.gateway.parsing.cases import CASES, CITY, TAGS
from tests.unit.gateway.parsing.formats import SCHEMAS, Said, parse, said_of

EOS = 2
SHAPES = [
    CallShape(name="weather", parameters={**SCHEMAS["weather"], "required": ["city"]}, is_strict=False),
    CallShape(name="now", parameters=SCHEMAS["now"], is_strict=False),
]
MARKS = {name: next((case.marks for case in CASES.values() if case.calls == name and case.marks), ()) for name in CALLS}
WIRES = [name for name, one in CALLS.items() if one.wire is not None]


@cache
def tokenizer_with(marks: tuple[str, ...], folder: Path) -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    folder.mkdir()
    build_tokenizer(folder, added=marks)
    raw = (folder / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(raw)
    return tokenizer, LLTokenizer(raw, eos_token=[EOS]), {mark: tokenizer.token_to_id(mark) for mark in marks}


class Follower:
    """A format, its tokenizer, and whether a grammar takes a text."""

    def __init__(self, name: str, folder: Path, *, reasoning: str = "none") -> None:
        self.wire: Wire | None = CALLS[name].wire
        self.tokenizer, self._library, self.vocabulary = tokenizer_with(MARKS[name], folder / name)
        self.bound: Bound = choose("", self.vocabulary, parsers=Parsers(name, reasoning))

    def grammar(self, **shape: Any) -> str:
        return message_grammar(self.bound, Shape(**shape), [EOS])

    def takes(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self._library, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def said(self, text: str) -> Said:
        return said_of(parse(self.bound, text, self.vocabulary))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grammars")


def written(wire: Wire, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a model would write them."""
    texts = []
    for index, (name, arguments) in enumerate(calls):
        if wire.argument:
            parts = (
                wire.argument.replace("{key}", key)
                .replace("{is_text}", json.dumps(isinstance(value, str)))
                .replace("{value}", value if isinstance(value, str) else json.dumps(value))
                for key, value in arguments.items()
            )
            text = "".join(parts)
        elif wire.arguments == "python":
            text = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        elif wire.arguments == "gemma":
            quoted = {
                key: f'<|"|>{value}<|"|>' if isinstance(value, str) else value for key, value in arguments.items()
            }
            text = "{" + ",".join(f"{key}:{value}" for key, value in quoted.items()) + "}"
        else:
            text = json.dumps(arguments, ensure_ascii=False)
        texts.append(
            wire.call.replace("{name}", name)
            .replace("{index}", str(index))
            .replace("{id}", "a1")
            .replace("{arguments}", text)
        )
    return wire.opens + wire.between.join(texts) + wire.closes


@pytest.mark.parametrize("name", WIRES)
def test_what_a_grammar_takes_is_read_as_calls(name: str, folder: Path) -> None:
    follower = Follower(name, folder)
    assert follower.wire is not None
    grammar = follower.grammar(calls=SHAPES, must_call=True)
    one, two = written(follower.wire, ("weather", CITY)), written(follower.wire, ("weather", CITY), ("now", {}))
    assert follower.takes(grammar, one)
    assert follower.said(one).calls == [("weather", CITY)]
    assert follower.takes(grammar, two)
    assert follower.said(two).calls[0] == ("weather", CITY)
    single = follower.grammar(calls=SHAPES, must_call=True, is_single=True)
    assert follower.takes(single, one)
    assert not follower.takes(single, two)


@pytest.mark.parametrize("name", WIRES)
def test_a_grammar_refuses_what_is_no_call(name: str, folder: Path) -> None:
    follower = Follower(name, folder)
    wire = follower.wire
    assert wire is not None
    grammar = follower.grammar(calls=SHAPES, must_call=True)
    for wrong in ("Hello", "", written(wire, ("other", {})), written(wire, ("weather", {"days": 3}))):
        assert not follower.takes(grammar, wrong), wrong
    assert not follower.takes(grammar, written(wire, ("weather", {"city": "x", "days": [1]})))


@pytest.mark.parametrize("name", [name for name in WIRES if CALLS[name].wire.is_telling])  # type: ignore[union-attr]
def test_text_is_free_until_a_call_opens(name: str, folder: Path) -> None:
    follower = Follower(name, folder)
    wire = follower.wire
    assert wire is not None
    grammar = follower.grammar(calls=SHAPES)
    assert follower.takes(grammar, "Any text.")
    assert follower.takes(grammar, "Well: " + written(wire, ("weather", CITY)))
    assert not follower.takes(grammar, "Well: " + written(wire, ("other", {})))


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_what_begins_like_a_call_of_a_tool_is_one(name: str, folder: Path) -> None:
    follower = Follower(name, folder)
    wire = follower.wire
    assert wire is not None
    grammar = follower.grammar(calls=SHAPES)
    one = written(wire, ("weather", CITY))
    for text in ("Any text.", "", '{"name": "Anna", "age": 3}', "[1, 2] is a list", "[other(a=1)]", one):
        assert follower.takes(grammar, text), text
    assert follower.said(one) == Said("", "", [("weather", CITY)])
    unlike = written(wire, ("weather", {"days": 3})), written(wire, ("weather", {"city": "x", "days": [1]}))
    spaced = '{"name":"weather","parameters":{"days":3}}' if name == "llama3_json" else " [ weather(days=3)]"
    opened = "<|python_start|>" if name == "pythonic" else "<|python_tag|>"
    for text in (*unlike, spaced, f"\n{unlike[0]}", opened + unlike[0], f"So: {opened}Hello"):
        assert not follower.takes(grammar, text), text
    assert not follower.takes(follower.grammar(calls=SHAPES, is_single=True), written(wire, ("now", {}), ("now", {})))


def test_a_call_may_be_opened_by_its_token_behind_text(folder: Path) -> None:
    follower = Follower("llama3_json", folder)
    grammar, one = follower.grammar(calls=SHAPES), written(follower.wire, ("weather", CITY))  # type: ignore[arg-type]
    for text in (f"<|python_tag|>{one}", f"So: <|python_tag|>{one}"):
        assert follower.takes(grammar, text), text
        assert follower.said(text).calls == [("weather", CITY)]


def test_harmony_s_parts_say_whether_they_call(folder: Path) -> None:
    follower = Follower("harmony", folder)
    grammar = follower.grammar(calls=SHAPES, thinks=True)
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    thought, next_part = "<|channel|>analysis<|message|>Hm", "<|end|><|start|>assistant"
    for text in (
        "<|channel|>final<|message|>Hello",
        f"{thought}{next_part}<|channel|>final<|message|>Hello",
        f'{thought}{next_part}{thought}{next_part}{call}{{"city": "x"}}',
        f'<|channel|>commentary<|message|>I look.{next_part}{call}{{"city": "x"}}',
    ):
        assert follower.takes(grammar, text), text
    for text in (
        f'{call}{{"days": 3}}',
        f'{call.replace("weather", "other")}{{"city": "x"}}',
        "Hello",
        f" to=functions.weather{call}",
    ):
        assert not follower.takes(grammar, text), text


def test_without_tokens_for_its_marks_harmony_is_left_alone(folder: Path) -> None:
    follower = Follower("harmony", folder)
    follower.bound = choose("", {}, parsers=Parsers("harmony", "none"))
    assert follower.grammar(calls=SHAPES) == ""


def test_reasoning_may_come_first_and_has_its_budget(folder: Path) -> None:
    follower = Follower("hermes", folder, reasoning="think")
    call = written(follower.wire, ("now", {}))  # type: ignore[arg-type]
    grammar = follower.grammar(calls=SHAPES, must_call=True, thinks=True)
    thought = f"<think>\nLet me think.\n</think>\n\n{call}"
    assert follower.takes(grammar, thought)
    assert follower.takes(grammar, call)
    assert follower.said(thought) == Said("", "Let me think.", [("now", {})])
    assert not follower.takes(grammar, "<think>\nLet me think.")
    short = follower.grammar(calls=SHAPES, must_call=True, thinks=True, budget=3)
    assert not follower.takes(short, thought)
    assert follower.takes(follower.grammar(thinks=True, budget=50), "<think>\nHm\n</think>\n\nYes <tool_call>x")


@pytest.mark.parametrize(
    "body",
    [LLMatcher.grammar_from_json_schema({"type": "object"}), LLMatcher.grammar_from_regex(r"\{.*\}"), 'start: "{}"'],
)
def test_content_may_follow_a_grammar_of_its_own(body: str, folder: Path) -> None:
    follower = Follower("hermes", folder, reasoning="think")
    alone = with_body(follower.grammar(has_body=True, thinks=True), body)
    assert follower.takes(alone, "<think>Hm</think>\n\n{}")
    assert follower.takes(alone, "{}")
    assert not follower.takes(alone, "Hello")
    either = with_body(follower.grammar(calls=SHAPES, has_body=True), body)
    assert follower.takes(either, "{}")
    assert follower.takes(either, written(follower.wire, ("now", {})))  # type: ignore[arg-type]
    assert not follower.takes(either, "Hello")


HEADS = {
    "harmony": ("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant", "<|channel|>final<|message|>"),
    "solar": ("<|think|>Hm<|end|><|begin|>assistant", "<|content|>"),
    "cohere": ("<|START_THINKING|>Hm<|END_THINKING|>", "<|START_RESPONSE|>"),
}


@pytest.mark.parametrize("name", HEADS)
def test_content_of_a_message_in_parts_may_have_its_head(name: str, folder: Path) -> None:
    follower, (thought, head) = Follower(name, folder), HEADS[name]
    alone = with_body(follower.grammar(has_body=True, thinks=True), 'start: "{}"')
    for text in ("{}", f"{head}{{}}", f"{thought}{head}{{}}"):
        assert follower.takes(alone, text), text
        assert follower.said(text).content == "{}"
    assert not follower.takes(alone, f"{head}no")
    silent = with_body(follower.grammar(has_body=True), 'start: "{}"')
    assert not follower.takes(silent, f"{thought}{head}{{}}")


@pytest.mark.parametrize("name", HEADS)
def test_a_call_that_is_required_may_follow_thoughts(name: str, folder: Path) -> None:
    follower, (thought, _) = Follower(name, folder), HEADS[name]
    grammar = follower.grammar(calls=SHAPES, must_call=True, thinks=True)
    text = thought + written(follower.wire, ("weather", CITY))  # type: ignore[arg-type]
    assert follower.takes(grammar, text)
    assert follower.said(text) == Said("", "Hm", [("weather", CITY)])


def test_strict_schemas_are_followed_to_the_letter(folder: Path) -> None:
    follower = Follower("hermes", folder)
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 3}},
        "additionalProperties": False,
    }
    shape = CallShape(name="f", parameters=parameters, is_strict=True)
    grammar = follower.grammar(calls=[shape], must_call=True)
    assert follower.takes(grammar, written(follower.wire, ("f", {"n": 3})))  # type: ignore[arg-type]
    for wrong in ({"n": 4}, {"m": 1}):
        assert not follower.takes(grammar, written(follower.wire, ("f", wrong)))  # type: ignore[arg-type]


def test_tags_that_are_no_tokens_are_found_as_text(folder: Path) -> None:
    follower = Follower("hermes", folder)
    follower.bound = choose("", {}, parsers=Parsers("hermes", "none"))
    grammar = follower.grammar(calls=SHAPES)
    assert len(TAGS) == 4
    assert "opening[lazy]" in grammar


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("odd", [5, True, {"a": 1}, [5, ["x"]]], ids=str)
def test_an_odd_schema_is_written_all_the_same(name: str, odd: Any, folder: Path) -> None:
    for parameters in (
        {"properties": {"a": {"type": odd, "anyOf": odd, "enum": odd}}, "required": odd},
        {"properties": {"a": odd}},
        {"properties": odd},
    ):
        shape = CallShape(name="f", parameters=parameters, is_strict=False)
        assert "f" in Follower(name, folder).grammar(calls=[shape], must_call=True)


def test_a_grammar_that_grows_with_its_definitions_ends_at_the_bound(folder: Path) -> None:
    follower = Follower("qwen3_coder", folder)
    properties = {f"k{index}": {"type": "integer"} for index in range(100)}
    parameters = {"properties": properties, "$defs": {"a": {"description": "x" * 10_000}}}
    with pytest.raises(ValueError, match="too large"):
        follower.grammar(calls=[CallShape(name="f", parameters=parameters, is_strict=False)], must_call=True)
