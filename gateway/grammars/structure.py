"""vLLM's structural tags as Lark: texts, schemas and expressions, in sequence or as alternatives, tagged, with free text.

Parts are named as the API names them (`type`). What isn't known is refused by its place: `format.elements[1]: …`. For the child
process alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, grammar_from

from common.messages import MAX_GRAMMAR_CHARS
from gateway.grammars.wanted import Whitespace

MAX_PARTS = 256
_TEXT = "/(?s:.*)/"
Ends = Sequence[str]


def structure(tag: Any, specials: Collection[str], whitespace: Whitespace) -> str:
    """llguidance's text of a structural tag's `format`. `specials`: texts of the special tokens. Raises ValueError."""
    return _Writer(specials, whitespace).text(tag)


class _Writer:
    """A writer of rules. `_part` writes a part followed by one of the `ends`, where free text in it stops.

    A part that `must_end` stands before another: free text in it would have to know where that begins.
    """

    def __init__(self, specials: Collection[str], whitespace: Whitespace) -> None:
        self._specials = specials
        self._json_options = whitespace.options
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._left = MAX_GRAMMAR_CHARS
        self._kinds: dict[str, Callable[[Mapping[str, Any], str, Ends, bool], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def text(self, tag: Any) -> str:
        start = self._part(tag, "format", (), False)
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]}) if self._grammars else lark

    def _part(self, part: Any, at: str, ends: Ends, must_end: bool) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise ValueError(f"{at}: type must be one of {', '.join(self._kinds)}" + (f", not {kind}" if kind else ""))
        return self._kinds[kind](part, at, ends, must_end)

    def _rule(self, written: str, attributes: str = "") -> str:
        """Add a rule; return its name."""
        self._left -= len(written)
        if self._left < 0:
            raise ValueError(f"is too large: {MAX_GRAMMAR_CHARS} characters are allowed as a grammar")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {written}")
        return name

    def _const_string(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        return self._then(literal(_text(part, "value", at), self._specials), ends)

    def _json_schema(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        schema = part.get("json_schema", True)
        if not isinstance(schema, Mapping | bool) or part.get("style", "json") != "json":
            raise ValueError(f"{at}: json_schema must be an object, and style json")
        fields = dict(schema) if isinstance(schema, Mapping) else {}
        return self._then(self._rule("%json " + json.dumps({"x-guidance": self._json_options, **fields})), ends)

    def _regex(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        return self._then(self._other(LLMatcher.grammar_from_regex(_text(part, "pattern", at))), ends)

    def _grammar(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        return self._then(self._other(grammar_from("grammar", _text(part, "grammar", at))), ends)

    def _other(self, text: str) -> str:
        """A whole grammar as a part."""
        name = f"part_{len(self._grammars)}"
        one = json.loads(text)["grammars"][0] if text.lstrip().startswith("{") else {"lark_grammar": text}
        self._grammars.append({**one, "name": name})
        return f"@{name}"

    def _any_text(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        excluded = [name for name in ("excludes", "excluded_str", "excluded_strs") if part.get(name)]
        return self._free(at, ends, must_end, [text for name in excluded for text in _texts(part, name, at)])

    def _free(self, at: str, ends: Ends, must_end: bool, excluded: Sequence[str] = ()) -> str:
        """Free text up to the first end."""
        if must_end and not ends:
            raise ValueError(f"{at}: free text may only come last, or in a tag with an end")
        text = _without(excluded)
        if not ends:
            return self._rule(self._terminal(text))
        return "(" + " | ".join(self._until(end, text) for end in ends) + ")"

    def _until(self, end: str, text: str) -> str:
        first, *rest = pieces(end, self._specials)
        if first in self._specials:
            return f"{self._rule(self._terminal(text))} {literal(end, self._specials)}"
        name = self._rule(self._terminal(text), f"[suffix={json.dumps(first)}]")
        return " ".join([name, *(literal(piece, self._specials) for piece in rest)])

    def _terminal(self, text: str) -> str:
        """A terminal, which suffixes and lazy rules need."""
        if text == _TEXT:
            return text
        self._rules.append(f"T{len(self._rules)}: {text}")
        return f"T{len(self._rules) - 1}"

    def _sequence(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        elements = _list(part, "elements", at)
        if not elements:
            return self._then("", ends)
        last = len(elements) - 1
        before = [self._part(one, f"{at}.elements[{index}]", (), True) for index, one in enumerate(elements[:-1])]
        return " ".join([*before, self._part(elements[last], f"{at}.elements[{last}]", ends, must_end)])

    def _or(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        elements = _list(part, "elements", at)
        if not elements:
            raise ValueError(f"{at}: elements must not be empty")
        written = [self._part(one, f"{at}.elements[{index}]", ends, must_end) for index, one in enumerate(elements)]
        return f"({' | '.join(written)})"

    def _tag(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        begin, rest = self._begun(part, at, ends, must_end)
        return f"{literal(begin, self._specials)} {rest}"

    def _begun(self, part: Any, at: str, ends: Ends, must_end: bool) -> tuple[str, str]:
        """The start of a tag, and a rule for the rest."""
        if not isinstance(part, Mapping) or part.get("type", "tag") != "tag":
            raise ValueError(f"{at}: must be a tag")
        begin, end = _text(part, "begin", at), part.get("end", "")
        own = [one for one in (_texts(part, "end", at) if isinstance(end, list) else [_text(part, "end", at)]) if one]
        content = self._part(part.get("content"), f"{at}.content", own or ends, must_end)
        return begin, self._rule(self._then(content, ends) if own else content)

    def _triggered_tags(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        triggers, tags = _texts(part, "triggers", at), _list(part, "tags", at)
        if not (len(tags) > 0 and 0 < len(triggers) <= MAX_PARTS and all(triggers)):
            raise ValueError(f"{at}: must have 1 to {MAX_PARTS} tags and as many triggers")
        by_trigger: dict[str, list[str]] = {}
        whole: list[str] = []
        for index, tag in enumerate(tags):
            begin, rest = self._begun(tag, f"{at}.tags[{index}]", (), True)
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise ValueError(f"{at}.tags[{index}]: begin {begin!r} starts with none of the triggers")
            whole.append(f"{literal(begin, self._specials)} {rest}")
            by_trigger.setdefault(trigger, []).append(f"{literal(begin.removeprefix(trigger), self._specials)} {rest}")
        excluded = _texts(part, "excludes", at) if part.get("excludes") else []
        triggered = [self._triggered(trigger, bodies, excluded) for trigger, bodies in by_trigger.items()]
        one = self._rule(" | ".join(triggered))
        at_once = self._rule(" | ".join(whole)) if part.get("at_least_one") else ""
        none = self._free(at, ends, must_end, excluded)
        if part.get("stop_after_first"):
            return self._then(at_once, ends) if at_once else f"({self._then(one, ends)} | {none})"
        return f"{at_once} {one}* {none}"

    def _triggered(self, trigger: str, bodies: Sequence[str], excluded: Sequence[str]) -> str:
        """Text up to the trigger, and one of the tags that it starts."""
        return f"{self._lazily(trigger, excluded)} ({' | '.join(bodies)})"

    def _lazily(self, trigger: str, excluded: Sequence[str]) -> str:
        first, *rest = pieces(trigger, self._specials)
        text = _without(excluded)
        if first in self._specials:
            return f"{self._rule(self._terminal(text))} {literal(trigger, self._specials)}"
        if excluded:
            name = self._rule(self._terminal(text), f"[suffix={json.dumps(first)}]")
        else:
            name = self._rule(f"{_TEXT} {json.dumps(first)}", "[lazy]")
        return " ".join([name, *(literal(piece, self._specials) for piece in rest)])

    def _tags_with_separator(self, part: Mapping[str, Any], at: str, ends: Ends, must_end: bool) -> str:
        tags = _list(part, "tags", at)
        if not tags:
            raise ValueError(f"{at}: tags must not be empty")
        separator = literal(_text(part, "separator", at), self._specials)
        begun = [self._begun(tag, f"{at}.tags[{index}]", (), True) for index, tag in enumerate(tags)]
        one = self._rule(" | ".join(f"{literal(begin, self._specials)} {rest}" for begin, rest in begun))
        several = one if part.get("stop_after_first") else f"{one} ({separator} {one})*"
        return self._then(f"({several})" + ("" if part.get("at_least_one") else "?"), ends)

    def _then(self, written: str, ends: Ends) -> str:
        if not ends:
            return written or '""'
        return f"{written} ({' | '.join(literal(end, self._specials) for end in ends)})"


def pieces(text: str, specials: Collection[str]) -> list[str]:
    """Split a text at its special tokens."""
    named = sorted((special for special in specials if special and special in text), key=len, reverse=True)
    return [part for part in re.split("(" + "|".join(map(re.escape, named)) + ")", text) if part] if named else [text]


def literal(text: str, specials: Collection[str]) -> str:
    """A text as a Lark literal; special tokens in it are named, since no text contains them."""
    return " ".join(part if part in specials else json.dumps(part) for part in pieces(text, specials))


def _without(texts: Sequence[str]) -> str:
    """Text without any of these strings."""
    escaped = ("".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text) for text in texts if text)
    either = "|".join(escaped)
    return f"{_TEXT} & ~/(?s:.*)({either})(?s:.*)/" if either else _TEXT


def _text(part: Mapping[str, Any], name: str, at: str) -> str:
    value = part.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{at}: {name} must be a string")
    return value


def _list(part: Mapping[str, Any], name: str, at: str) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        raise ValueError(f"{at}: {name} must be a list of at most {MAX_PARTS}")
    return value


def _texts(part: Mapping[str, Any], name: str, at: str) -> list[str]:
    texts = _list(part, name, at)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{at}: {name} must be a list of strings")
    return texts
