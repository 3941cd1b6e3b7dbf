"""An answer that a grammar binds begins to think only where its model does so unasked, and nobody said that it should not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from tests.models import CALL_TEMPLATE, TOOL_TOKENS, build_tokenizer
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BOUND: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["Paris", "Rome"]}}, "Paris"),
    ({"structured_outputs": {"regex": "Par.*"}}, "Paris"),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, '{"a": 1}'),
    ({"guided_choice": ["Paris", "Rome"]}, "Rome"),
    ({"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
     '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
]  # fmt: skip
UNWANTED: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"include_reasoning": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"reasoning_effort": "none"}},
]


@pytest.fixture(scope="module")
async def thinking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A model that opens its reasoning by itself: the template says nothing of it."""
    folder = tmp_path_factory.mktemp("thinking")
    build_tokenizer(folder, template=CALL_TEMPLATE + "{# <think> #}", added=TOOL_TOKENS)
    async with run_gateway(ChatTokenizer(folder), HttpSettings()) as gateway:
        gateway.script.max_model_len = 4096
        yield gateway


@pytest.fixture(scope="module")
async def asked(demo: ChatTokenizer) -> AsyncIterator[Gateway]:
    """The demo, whose template opens the reasoning when it is asked to."""
    async with run_gateway(demo, HttpSettings()) as gateway:
        gateway.script.max_model_len = 4096
        yield gateway


async def takes(gateway: Gateway, fields: dict[str, Any], *texts: str) -> list[bool]:
    """Texts that the answer's grammar lets the model write, from where the prompt left off."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4} | fields
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    grammar = gateway.script.submitted[-1].grammar
    assert grammar is not None
    library = LLTokenizer(gateway.tokenizer.tokenizer.to_str(), eos_token=gateway.tokenizer.eos_ids)
    found = []
    for text in texts:
        matcher = LLMatcher(library, grammar.text, log_level=0)
        ids = gateway.tokenizer.encode(text, add_special_tokens=False)
        if grammar.after is not None:
            ids = ids[ids.index(grammar.after[-1]) + 1 :]
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


@pytest.mark.parametrize(("fields", "text"), BOUND)
async def test_a_model_that_thinks_by_itself_may_unless_it_is_told_not_to(
    thinking: Gateway, fields: dict[str, Any], text: str
) -> None:
    assert await takes(thinking, fields, text, f"<think>\nHm\n</think>\n\n{text}") == [True, True]
    for unwanted in UNWANTED:
        assert await takes(thinking, fields | unwanted, text, f"<think>\nHm\n</think>\n\n{text}") == [True, False]


@pytest.mark.parametrize(("fields", "text"), BOUND)
async def test_where_the_template_opens_reasoning_only_it_does(
    asked: Gateway, fields: dict[str, Any], text: str
) -> None:
    for said in ({}, *UNWANTED):
        assert await takes(asked, fields | said, text, f"<think>\nHm\n</think>\n\n{text}") == [True, False]
    wanted = fields | {"reasoning_effort": "high"}
    answers = [f"Hm\n</think>{text}", f"Hm\n</think>\n\n{text}", "Hm\n</think>\n\nno"]
    assert await takes(asked, wanted, *answers) == [True, True, False]


async def test_free_text_keeps_its_budget_of_thoughts(asked: Gateway) -> None:
    long = "<think>\nHm, so it is, and so will it be.\n</think>\n\nYes."
    assert await takes(asked, {"thinking_token_budget": 4}, "Yes.", long) == [True, False]


def test_whether_a_template_opens_reasoning_is_seen_by_asking_it(demo: ChatTokenizer, tokenizer: ChatTokenizer) -> None:
    assert demo.opens_reasoning
    assert not tokenizer.opens_reasoning
