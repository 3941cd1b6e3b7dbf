"""Fields that say which tokens may come, and how much of a prompt is kept."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.conftest import MODEL, Gateway


async def asked(gateway: Gateway, **fields: Any) -> Any:
    await gateway.openai.completions.create(model=MODEL, prompt="one two three four", max_tokens=1, extra_body=fields)
    return gateway.script.submitted[-1]


async def test_allowed_tokens_go_to_the_workers_once_each(gateway: Gateway) -> None:
    grammar = (await asked(gateway, allowed_token_ids=[40, 41, 40])).grammar
    assert (grammar.allowed, grammar.banned, grammar.text) == ([40, 41], [], "")


async def test_a_word_is_banned_at_the_beginning_and_behind_a_space(gateway: Gateway) -> None:
    grammar = (await asked(gateway, bad_words=["capital", " capital"])).grammar
    texts = {gateway.tokenizer.decode(run, skip_special_tokens=False) for run in grammar.banned}
    assert texts == {"capital", " capital"}


async def test_limits_join_what_the_answer_follows(gateway: Gateway) -> None:
    grammar = (await asked(gateway, allowed_token_ids=[40], structured_outputs={"choice": ["a", "b"]})).grammar
    assert grammar.text
    assert grammar.allowed == [40]


@pytest.mark.parametrize(("longest", "kept"), [(2, 2), (1_000, None), (-1, None)])
async def test_a_long_prompt_loses_its_beginning(gateway: Gateway, longest: int, kept: int | None) -> None:
    whole = gateway.tokenizer.encode("one two three four")
    spec = await asked(gateway, truncate_prompt_tokens=longest)
    assert spec.token_ids == (whole if kept is None else whole[-kept:])


LONG = "".join(f"word {number} of a long text, " for number in range(1_500))


@pytest.mark.parametrize("longest", [1, 20, 200])
async def test_a_text_longer_than_the_context_loses_its_beginning(gateway: Gateway, longest: int) -> None:
    """Also one that is refused by its length alone otherwise."""
    whole, body = gateway.tokenizer.encode(LONG), {"model": MODEL, "max_tokens": 1, "truncate_prompt_tokens": longest}
    assert (await gateway.http.post("/v1/completions", json=body | {"prompt": LONG})).status_code == 200
    assert gateway.script.submitted[-1].token_ids == whole[-longest:]
    assert (await gateway.http.post("/v1/completions", json=body | {"prompt": whole})).status_code == 200
    assert gateway.script.submitted[-1].token_ids == whole[-longest:]
    messages = [{"role": "user", "content": LONG}]
    for parse_special in (False, True):
        asked = body | {"messages": messages, "parse_special": parse_special}
        assert (await gateway.http.post("/v1/chat/completions", json=asked)).status_code == 200
        assert gateway.script.submitted[-1].token_ids == gateway.tokenizer.encode_chat(messages)[-longest:]


async def test_a_long_text_keeps_what_the_context_has_room_for(gateway: Gateway) -> None:
    limit = gateway.script.max_model_len or 0
    for max_tokens, kept in ((None, limit - 1), (50, limit - 50)):
        body = {"model": MODEL, "prompt": LONG, "truncate_prompt_tokens": -1, "max_tokens": max_tokens}
        assert (await gateway.http.post("/v1/completions", json=body)).status_code == 200
        assert gateway.script.submitted[-1].token_ids == gateway.tokenizer.encode(LONG)[-kept:]


async def test_a_truncation_beyond_the_context_is_refused(gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": LONG, "truncate_prompt_tokens": 100_000}
    answer = await gateway.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_tokens_outside_the_vocabulary_are_named(gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": "x", "allowed_token_ids": [99_999_999]}
    response = await gateway.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "allowed_token_ids"
