"""Fields of other servers: each means one of ours, is ignored and named, or is refused with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from common.errors import InvalidRequestError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.dialects.foreign import Foreign
from gateway.dialects.openai.foreign import CHAT, COMPLETIONS
from gateway.dialects.openai.schema import ChatRequest, CompletionRequest
from gateway.http.fields import IGNORED_HEADER, parse_body
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway
from tests.unit.gateway.foreign_fields import table

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
BODIES: dict[type[Any], dict[str, Any]] = {
    ChatRequest: {"model": MODEL, "messages": MESSAGES},
    CompletionRequest: {"model": MODEL, "prompt": "Hello"},
}
KINDS = [(ChatRequest, CHAT), (CompletionRequest, COMPLETIONS)]


def read(model: type[Any], *, ignores_unknown: bool = False, **fields: Any) -> Any:
    return parse_body(json.dumps(BODIES[model] | fields).encode(), model, ignores_unknown=ignores_unknown)


def test_the_manual_has_the_table() -> None:
    manual = (Path(__file__).parents[3] / "docs/http-api.md").read_text(encoding="utf-8")
    assert table() in manual, "PYTHONPATH=. .venv/bin/python -m tests.unit.gateway.foreign_fields"


@pytest.mark.parametrize(("model", "foreign"), KINDS, ids=["chat", "completions"])
def test_no_field_is_both_ours_and_another_server_s(model: type[Any], foreign: dict[str, Foreign]) -> None:
    assert not foreign.keys() & (model.model_fields.keys() | model.unsupported.keys() | model.inert)


@pytest.mark.parametrize(("model", "foreign"), KINDS, ids=["chat", "completions"])
def test_each_field_is_ignored_and_named_or_refused_or_means_ours(
    model: type[Any], foreign: dict[str, Foreign]
) -> None:
    for name, one in foreign.items():
        assert read(model, **{name: None}).ignored == ()
        if one.means is None and not one.is_refused:
            assert read(model, **{name: {"a": [1]}}).ignored == (name,)
        if one.is_refused:
            for off in one.off:
                assert read(model, **{name: off}).ignored == ()
            with pytest.raises(InvalidRequestError) as refused:
                read(model, **{name: "yes"})
            assert (refused.value.param, str(refused.value)) == (name, f"{name}: {one.says}")


MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n_predict": 5}, {"max_tokens": 5}),
    ({"n_predict": -1}, {"max_tokens": None}),
    ({"max_new_tokens": 5, "max_tokens": 7}, {"max_tokens": 7}),
    ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"typical": 0.5, "random_seed": 3}, {"typical_p": 0.5, "seed": 3}),
    ({"stop_sequences": ["a"], "banned_strings": ["b"]}, {"stop": ["a"], "bad_words": ["b"]}),
    ({"truncate": 9, "extra_key": "k"}, {"truncate_prompt_tokens": 9, "cache_salt": "k"}),
    ({"ban_eos_token": True, "no_stop_trim": True}, {"ignore_eos": True, "include_stop_str_in_output": True}),
    ({"do_sample": False}, {"temperature": 0}),
    ({"do_sample": True}, {"temperature": None}),
    ({"do_sample": False, "temperature": 0.5}, {"temperature": 0.5}),
    ({"usage": {"include": True}, "stream": True}, {"include_usage": True}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    ({"format": ""}, {"response_format": None}),
    (
        {"options": {"temperature": 0.5, "num_predict": 4, "num_ctx": 8192, "repeat_penalty": 1.2, "mirostat": 0}},
        {"temperature": 0.5, "max_tokens": 4, "repetition_penalty": 1.2},
    ),
]


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
@pytest.mark.parametrize(("given", "meant"), MEANINGS, ids=str)
def test_what_other_servers_names_mean(model: type[Any], given: dict[str, Any], meant: dict[str, Any]) -> None:
    body = read(model, **given)
    assert {name: getattr(body, name) for name in meant} == meant
    assert body.ignored == ()


THINKS = {"enable_thinking": True, "thinking": True}
THINKS_NOT = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("given", "variables", "budget", "shows"),
    [
        ({"enable_thinking": True}, THINKS, None, True),
        ({"enable_thinking": False}, THINKS_NOT, None, True),
        ({"disable_reasoning": True}, THINKS_NOT, None, True),
        ({"think": False}, THINKS_NOT, None, True),
        ({"think": "low"}, THINKS | {"reasoning_effort": "low"}, None, True),
        ({"thinking": {"type": "disabled"}}, THINKS_NOT, None, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, THINKS, 50, True),
        ({"thinking": {"type": "adaptive"}}, {}, None, True),
        ({"thinking": True}, THINKS, None, True),
        ({"reasoning": {"effort": "high", "exclude": True}}, THINKS | {"reasoning_effort": "high"}, None, False),
        ({"reasoning": {"max_tokens": 9, "enabled": True}}, THINKS, 9, True),
        ({"reasoning_budget": 7, "reasoning_format": "auto"}, {}, 7, True),
        ({"reasoning_format": "hidden"}, {}, None, False),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            {"enable_thinking": False, "thinking": True, "a": 1}, None, True,
        ),
        ({"separate_reasoning": True}, {}, None, True),
    ],
    ids=str,
)  # fmt: skip
def test_thinking_is_asked_for_in_many_ways(
    given: dict[str, Any], variables: dict[str, Any], budget: int | None, shows: bool
) -> None:
    body = read(ChatRequest, **given)
    assert (body.template_variables, body.reasoning_budget, body.include_reasoning) == (variables, budget, shows)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"regex": "a+"}, "regex"), ({"ebnf": 'root ::= "a"'}, "ebnf"), ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": {"type": "object"}}, "json_schema"), ({"json_schema": '{"type": "object"}'}, "json_schema"),
        ({"grammar": {"type": "regex", "value": "a+"}}, "grammar"),
        ({"grammar": {"type": "json", "value": {"type": "object"}}}, "grammar"),
    ],
)  # fmt: skip
def test_an_answer_follows_what_other_servers_call_a_grammar(given: dict[str, Any], field: str) -> None:
    followed = read(ChatRequest, **given).followed
    assert followed is not None
    assert followed.field == field
    with pytest.raises(InvalidRequestError, match="send one of them"):
        read(ChatRequest, **given, response_format={"type": "json_object"})


def test_an_empty_grammar_is_none() -> None:
    assert read(CompletionRequest, grammar="", ebnf="", regex="").followed is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"thinking": {"type": "on"}}, "thinking: type must be one of"),
        ({"enable_thinking": "yes"}, "enable_thinking: must be true or false"),
        ({"reasoning_format": "none"}, "reasoning_format: reasoning comes apart"),
        ({"options": {"mirostat": 2}}, "options: mirostat: not supported"),
        ({"options": {"options": {}}}, "options: no options of options"),
        ({"options": {"temprature": 1}}, "unknown field 'temprature': did you mean 'temperature'?"),
        ({"format": 5}, "format: must be an object"),
        ({"temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?"),
        ({"xyzzy": 1}, "unknown field 'xyzzy': remove it or check its spelling"),
    ],
)
def test_what_is_wrong_is_told_by_the_client_s_own_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(ChatRequest, **given)
    assert says in str(refused.value)


@pytest.mark.parametrize(("model", "foreign"), KINDS, ids=["chat", "completions"])
def test_what_the_document_allows_is_accepted(model: type[Any], foreign: dict[str, Foreign]) -> None:
    values = (None, True, False, 0, 1, 3, -1, 0.5, "", "json", "auto", "low", [], ["a"], {})
    properties = model.model_json_schema()["properties"]
    for name in foreign:
        allowed = [value for value in values if Draft202012Validator(properties[name]).is_valid(value)]
        assert allowed
        for value in allowed:
            read(model, **{name: value})


def test_unknown_fields_are_left_out_where_a_gateway_ignores_them() -> None:
    body = read(
        ChatRequest, ignores_unknown=True, xyzzy=1, cache_prompt=True, n_predict=3, verbosity="low", nothing=None
    )
    assert (body.ignored, body.max_tokens) == (("xyzzy", "cache_prompt"), 3)


async def test_the_answer_names_what_was_ignored(gateway: Gateway) -> None:
    chat = {**BODIES[ChatRequest], "max_tokens": 2, "cache_prompt": True, "keep_alive": "5m"}
    for stream in (False, True):
        answer = await gateway.http.post("/v1/chat/completions", json=chat | {"stream": stream})
        assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, "cache_prompt, keep_alive")
    plain = await gateway.http.post("/v1/chat/completions", json={**BODIES[ChatRequest], "max_tokens": 2})
    assert IGNORED_HEADER not in plain.headers


async def test_a_gateway_may_ignore_what_nobody_knows(tokenizer: ChatTokenizer) -> None:
    odd = {"xyzzy": 1, "a\r\nx-evil: 1": 2, "é": 3} | {f"f{index}": index for index in range(40)}
    async with run_gateway(tokenizer, HttpSettings(ignores_unknown_fields=True)) as gateway:
        answer = await gateway.http.post("/v1/completions", json=BODIES[CompletionRequest] | {"max_tokens": 2} | odd)
    named = answer.headers[IGNORED_HEADER].split(", ")
    assert (answer.status_code, named[0], named[-1]) == (200, "xyzzy", "and 11 more")
    assert "x-evil" not in answer.headers
