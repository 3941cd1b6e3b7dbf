"""What clients ask their answers to follow, over HTTP: it reaches the job, or is refused with the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gateway.answers.tokenizer import ChatTokenizer
from tests.models import VOCAB_SIZE
from tests.unit.gateway.conftest import MODEL, Gateway

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
OPEN = {name: value for name, value in AGE.items() if name != "additionalProperties"}
TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": AGE, "end": "</a>"}], "triggers": ["<a>"]}
TREE = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": AGE}, "end": "</a>"},
}
UNENFORCED = {"type": "json_schema", "json_schema": {"schema": {"if": 1}, "strict": True}}


NESTED = '{"not":' * 980 + "{}" + "}" * 980
HALF = json.dumps(TAG).replace("<a>", "\\ud83d")
FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"b":[1]}', "[1]"),
    ({"response_format": {"type": "json_object", "value": AGE}}, '{"age":1}', "{}"),
    ({"response_format": {"type": "json", "value": AGE}}, '{"age":1}', "{}"),
    ({"response_format": {"type": "regex", "value": "[a-c]+"}}, "abc", "d"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": AGE, "strict": True}}}, '{"age":1}', "{}"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": AGE | {"if": {}}}}}, '{"age":1}', "{}"),
    ({"response_format": TAG}, 'so: <a>{"age":1}</a>', "<a>{}"),
    ({"response_format": TREE}, '<a>{"age":1}</a>', "<a>{}</a>"),
    ({"structured_outputs": {"structural_tag": json.dumps(TREE)}}, '<a>{"age":1}</a>', "<a>{}</a>"),
    ({"structured_outputs": {"json": AGE, "disable_any_whitespace": True}}, '{"age":1}', '{"age": 1}'),
    ({"structured_outputs": {"json": json.dumps(AGE), "whitespace_pattern": "[ ]?"}}, '{"age": 1}', '{"age":  1}'),
    ({"structured_outputs": {"json": OPEN, "disable_additional_properties": True}}, '{"age":1}', '{"age":1,"b":2}'),
    ({"structured_outputs": {"json": OPEN}}, '{"age":1,"b":2}', "{}"),
    ({"structured_outputs": {"json_object": True, "regex": None}}, "{}", "[]"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "none", "<a>x"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x1", "x"),
    ({"guided_json": AGE}, '{"age":1}', "{}"),
    ({"guided_regex": "^[0-9]{2}$", "guided_decoding_backend": "xgrammar"}, "12", "1"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ({"guided_grammar": 'start: "a" | "b"'}, "b", "c"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "right", "wrong"), FORMATS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_form_reaches_the_job(
    path: str, fields: dict[str, Any], right: str, wrong: str, gateway: Gateway, tokenizer: ChatTokenizer
) -> None:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await gateway.http.post(path, json={"model": MODEL, "max_tokens": 4, "n": 2} | prompt | fields)
    assert answer.status_code == 200, answer.text
    one, other = gateway.script.submitted[-2:]
    assert one.grammar is not None
    assert one.grammar == other.grammar
    known = _guide(tokenizer.tokenizer)
    assert _matches(known, one.grammar.text, right)
    assert not _matches(known, one.grammar.text, wrong)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}}, "response_format", "strng"),
        ({"response_format": UNENFORCED}, "response_format", "if"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "format: type must be"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "needs a format, or structures"),
        ({"response_format": TAG | {"triggers": ["<b>"]}}, "response_format", "none of the triggers"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"structural_tag": "[" * 5_000}}, "structured_outputs", "too deep"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "structural_tag isn't JSON"),
        ({"structured_outputs": {"json": "[" * 5_000, "disable_additional_properties": True}}, "structured_outputs", "too deep"),
        ({"structured_outputs": {"json": NESTED, "disable_additional_properties": True}}, "structured_outputs", "too deep"),
        ({"structured_outputs": {"structural_tag": HALF}}, "structured_outputs", "half a character"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "unknown field 'jsn'"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format as well"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "guided_choice"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, words: str, gateway: Gateway) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


async def test_text_is_no_form(gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1, "response_format": {"type": "text"}}
    assert (await gateway.http.post("/v1/completions", json=body)).status_code == 200
    assert gateway.script.submitted[-1].grammar is None


def _guide(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=2)


def _matches(tokenizer: LLTokenizer, text: str, answer: str) -> bool:
    matcher = LLMatcher(tokenizer, text, log_level=0)
    tokens = tokenizer.tokenize_str(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
