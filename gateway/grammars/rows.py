"""Row sizes of JSON schemas in llguidance's parser, whose rows are limited. For the child process only.

A worker meets that bound in the middle of an answer, where an object begins. So it is counted before, as the library writes
objects: while nothing of an object is written, each optional property that may come next takes 4 items, or 3 where a required
one follows; behind a required one 2. Alternatives stand in the same row.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from common.messages import GRAMMAR_LIMITS

SPARE_ITEMS = 10  # around an object's properties
MOST_ITEMS = GRAMMAR_LIMITS["max_items_in_row"] - SPARE_ITEMS
_JSON = json.JSONDecoder()


def check_rows(text: str) -> None:
    """Check a grammar's schemas. Raises ValueError if a row has too many items."""
    for schema in _schemas_in(text):
        items = _Rows(schema).most()
        if items > MOST_ITEMS:
            raise ValueError(
                f"properties: the optional ones of an object, with those of its alternatives, take {items} items of the parser,"
                f" {MOST_ITEMS} are allowed: require some of them, or group them in objects of their own"
            )


def _schemas_in(text: str) -> Iterator[Any]:
    """Schemas in llguidance's JSON, and within Lark. Unreadable ones are left to the library to refuse."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for grammar in json.loads(text)["grammars"] if text.lstrip().startswith("{") else [{"lark_grammar": text}]:
            if grammar.get("json_schema"):
                yield grammar["json_schema"]
            lark = grammar.get("lark_grammar") or ""
            for found in re.finditer(r"%json\s*(?=\{)", lark):
                yield _JSON.raw_decode(lark, found.end())[0]


class _Rows:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._starts: dict[int, int] = {}  # by a schema's id()

    def most(self) -> int:
        """Items of the largest row that any part of the schema starts or continues."""
        most, left = 0, [self._root]
        while left:
            part = left.pop()
            if isinstance(part, Mapping):
                most = max(most, self._start(part), 2 * max(_runs(part)[1:], default=0))
                left += part.values()
            elif isinstance(part, list):
                left += part
        return most

    def _start(self, schema: Any) -> int:
        """Items at the start of a value of the schema. A recursive one counts once."""
        if not isinstance(schema, Mapping):
            return 1
        if id(schema) not in self._starts:
            self._starts[id(schema)] = 0
            self._starts[id(schema)] = self._counted(schema)
        return self._starts[id(schema)]

    def _counted(self, schema: Mapping[str, Any]) -> int:
        first, *others = _runs(schema)
        items = first * (3 if others else 4)
        for name in ("anyOf", "oneOf", "allOf"):
            items += sum(map(self._start, _list(schema.get(name))))
        items += sum(isinstance(one, dict | list) for one in _list(schema.get("enum")))
        return max(1, items + (self._start(self._target(schema["$ref"])) if "$ref" in schema else 0))

    def _target(self, reference: Any) -> Any:
        """The target of a reference within the schema; None for an external one."""
        found = self._root
        for name in str(reference).split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if str(reference).startswith("#") else None


def _runs(schema: Mapping[str, Any]) -> list[int]:
    """Lengths of the runs of optional properties: before the first required one, and after each."""
    properties, required = schema.get("properties"), _list(schema.get("required"))
    runs = [0]
    for name in properties if isinstance(properties, Mapping) else ():
        if name in required:
            runs.append(0)
        else:
            runs[-1] += 1
    return runs


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
