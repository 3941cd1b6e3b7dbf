"""Arguments: JSON goes through as it is, what models write nearly right is repaired, text is converted by the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsing.json_text import JsonText
from gateway.parsing.values import converted, python_json, types_of
from tests.examples import examples

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


def through(text: str, size: int = 1) -> str:
    reader, out = JsonText(), ""
    for start in range(0, len(text), size):
        out += reader.push(text[start : start + size])[0]
    return out + reader.finish(is_whole=True)


@examples(60)
@given(value=values, size=st.integers(1, 9), indent=st.none() | st.just(2), ascii=st.booleans())
def test_json_goes_through_as_it_is(value: Any, size: int, indent: int | None, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert through(text, size) == text


@examples(40)
@given(value=values)
def test_python_s_notation_is_json_in_the_end(value: Any) -> None:
    text = python_json(repr(value))
    assert text is not None
    assert json.loads(text) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{'a': 'it\\'s', \"b\": None,}", {"a": "it's", "b": None}),
        ('{"a": "x\ny\tz", "b": [1, 2, ], }', {"a": "x\ny\tz", "b": [1, 2]}),
        ('{"path": "C:\\dir\\q"}', {"path": "C:\\dir\\q"}),
        ('{"a": "\\u00e9\\ud83d\\ude42 \\u12"}', {"a": "é🙂 \\u12"}),
        ("{a: True, b_c: -1.5e3, d: {}}", {"a": True, "b_c": -1500.0, "d": {}}),
        ('{"a": {"b": [1, 2', None),
        ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
        ("{", {}),
        ("", None),
    ],
)
def test_what_is_nearly_json_is_repaired(written: str, meant: Any) -> None:
    out = through(written)
    if meant is None and written:
        meant = {"a": {"b": [1, 2]}}
    assert (json.loads(out) if out else None) == meant


@pytest.mark.parametrize("written", ['{"a": 1 2}', '{"a" 1}', '{"a": b c}', "[1}", '{"a": "x', '{"a":', "{]"])
def test_what_isn_t_json_is_left_for_the_client_to_refuse(written: str) -> None:
    with pytest.raises(ValueError):
        json.loads(through(written))


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {}, "12"),
        ("12", {"type": "integer"}, 12),
        ("+12", {"type": ["null", "integer"]}, 12),
        ("None", {"type": ["string", "null"]}, None),
        ("1.50", {"type": "number"}, 1.5),
        ("7", {"type": "number"}, 7),
        ("1e400", {"type": "number"}, "1e400"),
        ("TRUE", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': (1, None, true)}", {"type": "object"}, {"a": [1, None, True]}),
        ("[1", {"type": "array"}, "[1"),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 3),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("3", {"enum": [3, 4]}, 3),
        ("3", {"$ref": "#/$defs/n"}, 3),
        ("3", {"$ref": "#/$defs/missing"}, "3"),
    ],
)
def test_text_is_converted_by_the_schema(text: str, schema: dict[str, Any], value: Any) -> None:
    types = types_of(schema, {"$defs": {"n": {"type": "integer"}}})
    assert json.loads(converted(text, types)) == value


def test_a_schema_that_refers_to_itself_ends() -> None:
    loop = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    assert types_of(loop, loop) == frozenset()


def test_a_schema_that_branches_into_itself_ends_soon() -> None:
    looked = 0

    class Counted(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal looked
            looked += 1
            return super().get(key, default)

    one = Counted({"anyOf": [{"$ref": "#/properties/a"}] * 4 + [{"type": "null"}]})
    assert types_of(one, {"properties": {"a": one}}) == {"null"}
    wide = Counted({"anyOf": [{"anyOf": [Counted({}) for _ in range(100)]} for _ in range(100)]})
    assert types_of(wide, wide) == frozenset()
    assert looked < 2_000


def test_a_reference_to_a_reference_is_followed() -> None:
    root = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "integer"}}}
    assert types_of({"$ref": "#/$defs/a"}, root) == {"integer"}


ODD: list[Any] = [5, True, {"a": 1}, [5, ["x"]], "x"]


@pytest.mark.parametrize("name", ["type", "anyOf", "enum", "$ref"])
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_what_no_schema_has_is_as_if_absent(name: str, odd: Any) -> None:
    assert types_of({name: odd}, {}) <= {"x", "string", "integer", "array"}
