"""Items of a schema in one row of the library's parser: refused where a worker would fail amid the answer, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.messages import GRAMMAR_LIMITS
from gateway.answers.tokenizer import ChatTokenizer
from gateway.grammars import forms
from gateway.grammars.wanted import Ebnf, Form, JsonSchema, StructuralTag
from gateway.parsing.grammar import CallShape, Shape, message_grammar


def some(count: int, name: str = "p") -> dict[str, Any]:
    return {f"{name}{index}": {"type": "integer"} for index in range(count)}


def of(count: int, *, before: str = "", after: str = "", **fields: Any) -> dict[str, Any]:
    """An object of optional properties, with a required one before or after them."""
    first, last = [{name: {}} if name else {} for name in (before, after)]
    properties = {**first, **some(count), **last}
    return {"type": "object", "properties": properties, "required": [*filter(None, [before, after])], **fields}


def within(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"in": schema}, "required": ["in"], "additionalProperties": False, **fields}


# A schema by its number of optional properties, the most that the library takes, and how an answer gets there.
SHAPES: list[tuple[Any, int, str]] = [
    (of, 498, "{"),
    (lambda n: of(n, additionalProperties=False), 500, "{"),
    (lambda n: of(n, after="z", additionalProperties=False), 666, "{"),
    (lambda n: of(n, before="a", additionalProperties=False), 999, '{"a": 1,'),
    (lambda n: within(of(n)), 498, '{"in": {'),
    (lambda n: within({"type": "array", "items": within({"anyOf": [{"type": "null"}, of(n)]})}), 498, '{"in": [{"in": {'),
    (lambda n: within({"$ref": "#/$defs/one"}, **{"$defs": {"one": of(n)}}), 498, '{"in": {'),
    (lambda n: {"anyOf": [of(n), {"type": "object", "properties": some(n, "q")}]}, 248, "{"),
    (lambda n: {"enum": [{"k": index} for index in range(n)]}, 2000, "{"),
]  # fmt: skip


@pytest.fixture(scope="module")
def library(tokenizer: ChatTokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.tokenizer.to_str())


def fails_at_a_worker(form: Form, answer: str, library: LLTokenizer) -> str:
    limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
    matcher = LLMatcher(library, forms.text_of(form, ()), log_level=0, limits=limits)
    assert not matcher.is_error()
    matcher.consume_tokens(library.tokenize_str(answer))
    return str(matcher.get_error()) if matcher.is_error() else ""


@pytest.mark.parametrize(("shape", "most", "answer"), SHAPES)
def test_too_many_optional_properties_are_refused_before_a_worker_meets_them(
    shape: Any, most: int, answer: str, library: LLTokenizer
) -> None:
    few, many = JsonSchema(schema=shape(most - 10)), JsonSchema(schema=shape(most + 10))
    assert not fails_at_a_worker(few, answer, library)
    forms.check(forms.text_of(few, ()), library)
    assert "max is 2000" in fails_at_a_worker(many, answer, library)
    with pytest.raises(ValueError, match="properties: the optional ones of an object") as refused:
        forms.check(forms.text_of(many, ()), library)
    assert "require some of them, or group them" in str(refused.value)


def test_schemas_within_other_grammars_are_counted_too(library: LLTokenizer) -> None:
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": of(600)}, "end": "</a>"}
    with pytest.raises(ValueError, match="group them"):
        forms.check(forms.text_of(StructuralTag(tag), ()), library)


def test_arguments_of_tools_are_counted_too(demo: ChatTokenizer) -> None:
    library = LLTokenizer(demo.tokenizer.to_str())
    shape = Shape(calls=[CallShape(name="f", parameters=of(600), is_strict=True)], must_call=True)
    with pytest.raises(ValueError, match="group them"):
        forms.check(message_grammar(demo.format, shape, demo.eos_ids), library)


def test_a_schema_that_means_itself_is_counted_once(library: LLTokenizer) -> None:
    tree = {"$ref": "#/$defs/tree", "$defs": {"tree": within({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]})}}
    forms.check(forms.text_of(JsonSchema(schema=tree), ()), library)


def test_rows_behind_what_must_come_are_seen(library: LLTokenizer) -> None:
    options = "\n".join(f'a{index}: "{index}," a{index + 1} | a{index + 1}' for index in range(1_100))
    lark = f'start: "so: it is: " a0\n{options}\na1100: "end"'
    with pytest.raises(ValueError, match="max is 2000"):
        forms.check(forms.text_of(Ebnf(lark), ()), library)
