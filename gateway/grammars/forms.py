"""Conversion of forms to llguidance's text, and a trial build. For the child process only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from decimal import Decimal
from typing import Any, assert_never

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from common.messages import GRAMMAR_LIMITS, MAX_GRAMMAR_CHARS
from gateway.grammars.rows import check_rows
from gateway.grammars.structure import structure
from gateway.grammars.wanted import Choice, Ebnf, Form, JsonSchema, Regex, StructuralTag, Text

MOST_FORCED = 8  # forced texts that are followed
MOST_WORDS = 400  # characters of the library's message
COSTLIEST_MULTIPLE = 20_000  # states of an automaton that counts remainders, which llguidance does not limit


def text_of(form: Form, specials: Collection[str]) -> str:
    """llguidance's text. `specials`: texts of the special tokens. Raises ValueError."""
    match form:
        case JsonSchema():
            return _json_schema(form)
        case Regex():
            return LLMatcher.grammar_from_regex(_whole(form.pattern))
        case Choice():
            return grammar_from("choice", json.dumps(list(form.options)))
        case Ebnf():
            return grammar_from("grammar", form.text)
        case StructuralTag():
            return structure(form.format, specials, form.whitespace)
        case Text():
            return form.text
        case _:
            assert_never(form)


def check(text: str, tokenizer: LLTokenizer) -> None:
    """Build the grammar, a first mask, and those after forced text. Raises ValueError with the library's message."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"is too large: {len(text)} characters as a grammar, {MAX_GRAMMAR_CHARS} are allowed")
    cost = cost_of_multiples(text)
    if cost > COSTLIEST_MULTIPLE:
        raise ValueError(f"multipleOf: its values together take {cost} states, {COSTLIEST_MULTIPLE} are allowed")
    check_rows(text)
    limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    for _ in range(MOST_FORCED):
        forced = [] if matcher.is_error() or matcher.is_stopped() else matcher.compute_ff_tokens()
        if not forced or not matcher.consume_tokens(forced):
            break
        matcher.compute_bitmask()
    if matcher.is_error():
        words = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        raise ValueError(words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]} …")


def cost_of_multiples(text: str) -> int:
    """States needed for the remainders of all `multipleOf` in a grammar together."""
    numbers = {Decimal(number) for number in re.findall(r'"multipleOf"\s*:\s*(-?[0-9][0-9.eE+-]*)', text)}
    if not numbers:
        return 1
    if any(abs(number.adjusted()) > 30 for number in numbers):
        return 10**30
    fraction = max(0, *(-int(number.as_tuple().exponent) for number in numbers))
    return math.lcm(*(abs(int(number.scaleb(fraction))) or 1 for number in numbers))


def _json_schema(form: JsonSchema) -> str:
    schema = json.loads(form.schema) if isinstance(form.schema, str) else form.schema
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema: an object")
    options: Any = {**form.whitespace.options, "lenient": not form.strict, "coerce_one_of": not form.strict}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _whole(pattern: str) -> str:
    """The pattern without anchors at its ends, unless `|` would make them part of one branch."""
    if "|" in pattern:
        return pattern
    pattern = pattern.removeprefix("^")
    escapes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern
