"""Grammars of messages in llguidance's Lark: calls in the model's format, after optional reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.messages import MAX_GRAMMAR_CHARS
from gateway.parsing.format import Wire
from gateway.parsing.json_text import COMPACT
from gateway.parsing.terminals import Bound
from gateway.parsing.values import Schema, is_text, types_of

_ANY = "/(?s:.*)/"
_BODY = "body"
_GAP = r"/[\x20\x0A]{0,4}/"  # whitespace between reasoning and answer
_FREE_PARTS = {"{index}": "/[0-9]{1,3}/", "{id}": "/[a-z0-9]{1,16}/"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """A callable function. Unless `is_strict`, unenforceable parts of its schema are ignored."""

    name: str
    parameters: Schema
    is_strict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The allowed messages. Without `calls` and `has_body` anything is, after bounded reasoning."""

    calls: Sequence[CallShape] = ()
    must_call: bool = False
    is_single: bool = False  # at most one call
    has_body: bool = False  # content has its own grammar
    thinks: bool = False  # it may start with reasoning
    has_thought: bool = False  # it follows reasoning that the prompt opened
    budget: int | None = None  # tokens of reasoning


def message_grammar(bound: Bound, shape: Shape, eos_ids: Sequence[int]) -> str:
    """The text of the Lark grammar; "" if nothing can be enforced. A body is `@body`, see `with_body`. Raises ValueError."""
    return _Writer(bound, shape, eos_ids).text()


def with_body(lark: str, body: str) -> str:
    """Combine a message's grammar with its content's, which is Lark or llguidance's JSON."""
    if body.lstrip().startswith("{"):
        first, *others = json.loads(body)["grammars"]
    else:
        first, others = {"lark_grammar": body}, []
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": _BODY}, *others]})


class _Writer:
    def __init__(self, bound: Bound, shape: Shape, eos_ids: Sequence[int]) -> None:
        self._bound = bound
        self._shape = shape
        self._eos_ids = eos_ids
        self._marks = sorted(bound.marks, key=len, reverse=True)
        self._rules: list[str] = []
        self._left = MAX_GRAMMAR_CHARS
        self._has_text_value = False

    def _rule(self, text: str) -> None:
        """Add a rule. A schema's definitions are repeated in each argument, so oversized grammars are refused here, early."""
        self._left -= len(text)
        if self._left < 0:
            raise ValueError(f"is too large: {MAX_GRAMMAR_CHARS} characters are allowed as a grammar")
        self._rules.append(text)

    def text(self) -> str:
        shape, wire = self._shape, self._bound.format.wire
        calls = shape.calls if wire is not None else ()
        if not calls and (shape.must_call or not (shape.has_body or shape.budget is not None)):
            return ""
        message = self._message(wire, calls)
        if not message:
            return ""
        thoughts = self._thoughts() if shape.thinks else _GAP if shape.has_thought else ""
        return "\n".join(["%llguidance {}", f"start: {thoughts} {message}", *self._rules])

    def _message(self, wire: Wire | None, calls: Sequence[CallShape]) -> str:
        shape = self._shape
        if wire is None or not calls:
            return self._body() if shape.has_body else f"{self._other_than([])}*"
        if shape.must_call:
            return self._calls(wire, calls, wire.opens)
        if shape.has_body:
            return f"({self._body()} | {self._calls(wire, calls, wire.opens)})"
        return self._lazily(wire, calls)

    def _body(self) -> str:
        """The content's grammar, after a message part's header."""
        wire = self._bound.format.wire
        head = wire.plain.partition("{text}")[0].replace("{channel}", "final") if wire is not None else ""
        return f"({self._literal(head)})? @{_BODY}" if head else f"@{_BODY}"

    def _thoughts(self) -> str:
        """Optional reasoning at the start."""
        format_ = self._bound.format
        if not format_.opens_reasoning:
            return ""
        bound = "" if self._shape.budget is None else f"[max_tokens={max(1, self._shape.budget)}]"
        closes = format_.closes_reasoning
        if closes in self._bound.marks or self._marked(closes)[0] in self._bound.marks:
            self._rule(f"thoughts{bound}: {_ANY}")
            closing = f"thoughts {self._literal(closes)}"
        else:
            self._rule(f"thoughts[suffix={json.dumps(closes)}]: {_ANY}")
            closing = "thoughts"
        return f"({self._literal(format_.opens_reasoning)} {closing} {_GAP})?"

    def _lazily(self, wire: Wire, calls: Sequence[CallShape]) -> str:
        """Free text, and calls wherever the first terminal of one appears."""
        head = wire.opens or re.split(r"\{(?:name|arguments)\}", wire.call)[0]
        parts = self._marked(head)
        first = next((part for part in parts if part in self._bound.marks or part.strip(" \n<")), "")
        repeats = "?" if self._shape.is_single else "*"
        if not wire.is_telling:
            return self._in_parts(wire, calls) if wire.plain else self._beside_text(wire, calls)
        if not first:
            return ""
        rest = self._calls(wire, calls, wire.opens, without=head[: head.index(first) + len(first)])
        if first in self._bound.marks:
            token = self._bound.marks[first]
            other = self._other_than([token])
            return f"{other}* (<[{token}]> {rest} {other}*){repeats}"
        self._rule(f"opening[lazy]: {_ANY} {json.dumps(first)}")
        return f"(opening {rest}){repeats} {_ANY}"

    def _beside_text(self, wire: Wire, calls: Sequence[CallShape]) -> str:
        """A message that starts like a call must be one; other text is free, except for openings of calls."""
        states, start = self._bound.format.states, self._bound.format.start
        openers = [one for one in states[start].exits if one.calls]
        self._free_text(wire, calls, [one.on for one in openers if not one.first])
        self._rule(f"calls: {self._calls(wire, calls, wire.opens, in_one=True)}")
        ways = ["FREE", "calls"]
        for opener in (one for one in openers if one.on in self._bound.marks):
            ends = [self._literal(one.on) for one in states[opener.to].exits if one.on in self._bound.marks]
            closing = f"({' | '.join(ends)})?" if ends else ""
            ways.append(f"FREE {self._literal(opener.on)} calls {closing}")
        return f"({' | '.join(ways)})"

    def _free_text(self, wire: Wire, calls: Sequence[CallShape], openers: Sequence[str]) -> None:
        """A terminal for text that no parser takes for a call of these tools, or for reasoning."""
        names = "|".join(_exactly(one.name) for one in calls)
        if wire.arguments == "python":
            begins = rf"\s*\[[\s\[\],;]*({names})\(.*"
        else:
            begins = rf'\s*[\[\{{].*"(name|function)"\s*:\s*"({names})".*'
        texts = [one for one in (*openers, self._bound.format.opens_reasoning) if one and one not in self._bound.marks]
        unsaid = "".join(f" & ~/(?s:.*{_exactly(text)}.*)/" for text in texts)
        self._rule(f"FREE: {_ANY} & ~/(?s:{begins})/{unsaid}")

    def _in_parts(self, wire: Wire, calls: Sequence[CallShape]) -> str:
        """Parts whose headers tell if they are calls; "" if the headers are no tokens."""
        before, _, behind = wire.plain.partition("{channel}")
        begins, parts = behind.partition("{text}")[0], self._marked(wire.next_part)
        if any(mark not in self._bound.marks for mark in (before, begins, parts[0])):
            return ""
        channels = "commentary|final" if self._shape.budget is not None else "analysis|commentary|final"
        self._rule(f"plain: {self._literal(before)} /{channels}/ {self._literal(begins)} {_ANY}")
        one = self._calls(wire, calls, wire.opens)
        return f"(plain {self._literal(wire.next_part)})* (plain | {one})"

    def _other_than(self, tokens: Sequence[int]) -> str:
        """Any token except these; the end of an answer is no token of its text."""
        excluded = sorted({*tokens, *self._eos_ids})
        return f"<[^{','.join(map(str, excluded))}]>" if excluded else "<[*]>"

    def _calls(
        self, wire: Wire, calls: Sequence[CallShape], opens: str, without: str = "", *, in_one: bool = False
    ) -> str:
        """One call, or several. `without`: their first terminal, already written. `in_one`: the opening and the first name are
        one terminal, beside which text may go on until they differ.
        """
        rest_of_opens = opens.replace(without, "", 1) if without and opens else opens
        first = "" if opens else without
        self._rule("call: " + " | ".join(self._call(wire, index, one) for index, one in enumerate(calls)))
        head = "call"
        if in_one:
            wire, rest_of_opens = replace(wire, call=wire.opens + wire.call), ""
        if first or in_one:
            names = [self._call(wire, index, one, without=first) for index, one in enumerate(calls)]
            self._rule("first_call: " + " | ".join(names))
            head = "first_call"
        for index, one in enumerate(calls):
            self._rule(f"arguments_{index}: {self._arguments(wire, index, one)}")
        between = self._literal(wire.between)
        more = "" if self._shape.is_single else f"({between} call)*"
        return " ".join(filter(None, [self._literal(rest_of_opens), head, more, self._literal(wire.closes)]))

    def _call(self, wire: Wire, index: int, call: CallShape, without: str = "") -> str:
        text = wire.call.replace(without, "", 1) if without else wire.call
        before, _, after = text.partition("{arguments}")
        written = [self._named(part, call.name) for part in (before, after)]
        return " ".join(filter(None, [written[0], f"arguments_{index}", written[1]]))

    def _named(self, text: str, name: str) -> str:
        parts = re.split(r"(\{index\}|\{id\})", text.replace("{name}", name))
        return " ".join(_FREE_PARTS.get(part) or self._literal(part) for part in parts)

    def _arguments(self, wire: Wire, index: int, call: CallShape) -> str:
        if wire.arguments == "json" and not wire.argument:
            return self._json(call, {"type": "object", **call.parameters})
        template, between, opens, closes = wire.argument, "", "", ""
        if wire.arguments == "python":
            template, between = "{key}={value}", ", "
        elif wire.arguments == "gemma":
            template, between, opens, closes = "{key}:{value}", ",", "{", "}"
        written = self._in_order(wire, index, call, template, between)
        return " ".join(filter(None, [self._literal(opens), written, self._literal(closes)])) or '""'

    def _in_order(self, wire: Wire, index: int, call: CallShape, template: str, between: str) -> str:
        """Rules for the arguments in the schema's order; optional arguments may be omitted."""
        properties = call.parameters.get("properties")
        listed = call.parameters.get("required")
        required = {one for one in listed if isinstance(one, str)} if isinstance(listed, list) else set()
        keys = list(properties) if isinstance(properties, Mapping) else []
        for at, key in enumerate(keys):
            value = self._argument(wire, call, template, key, properties[key] if properties else {})
            self._rule(f"value_{index}_{at}: {value}")
        following = {False: '""', True: '""'}  # True if an argument came before
        for at in range(len(keys) - 1, -1, -1):
            names = {}
            for has_before in (False, True):
                separator = self._literal(between) if has_before else ""
                written = f"{separator} value_{index}_{at} {following[True]}"
                names[has_before] = f"from_{index}_{at}_{int(has_before)}"
                lacks = "" if keys[at] in required else f" | {following[has_before]}"
                self._rule(f"{names[has_before]}: {written}{lacks}")
            following = names
        return following[False]

    def _argument(self, wire: Wire, call: CallShape, template: str, key: str, schema: Any) -> str:
        schema = schema if isinstance(schema, Mapping) else {}
        types = types_of(schema, call.parameters)
        may_be_text = is_text(types) or "string" in types
        template = template.replace("{is_text}", str(may_be_text).lower())
        before, _, after = template.replace("{key}", key).partition("{value}")
        options = schema.get("enum")
        begins = self._literal(before)
        if wire.arguments == "gemma" and is_text(types):
            quote = self._literal('<|"|>')
            return f"{begins} {quote} {_ANY} {quote}"
        if not wire.ends_value or not may_be_text:
            return f"{begins} {self._json(call, {**_definitions(call.parameters), **schema})} {self._literal(after)}"
        if isinstance(options, list) and options and all(isinstance(one, str) for one in options):
            return f"{begins} ({' | '.join(map(json.dumps, options))}) {self._literal(after)}"
        rest = self._literal(after.partition(wire.ends_value)[2])
        if wire.ends_value in self._bound.marks:
            return f"{begins} {_ANY} {self._literal(wire.ends_value)} {rest}"
        if not self._has_text_value:
            self._has_text_value = True
            self._rule(f"text_value[suffix={json.dumps(wire.ends_value)}]: {_ANY}")
        return f"{begins} text_value {rest}"

    def _json(self, call: CallShape, schema: Mapping[str, Any]) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": {**COMPACT, "lenient": not call.is_strict}})

    def _marked(self, text: str) -> list[str]:
        """A text split into special tokens and plain parts."""
        if not self._marks:
            return [text]
        return [part for part in re.split(f"({'|'.join(map(re.escape, self._marks))})", text) if part]

    def _literal(self, text: str) -> str:
        marks = self._bound.marks
        return " ".join(
            f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in self._marked(text) if part
        )


def _exactly(text: str) -> str:
    """An expression that matches this text only."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _definitions(schema: Schema) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}
