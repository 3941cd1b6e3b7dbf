"""Ending the reasoning of an answer that runs: what its client hears, and what becomes of the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.tenants.tenants import Tenants
from tests.models import TOOL_TEMPLATE, TOOL_TOKENS, build_tokenizer
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

CHAT, CONTROL = "/v1/chat/completions", "/v1/chat/completions/control"
KEYS = ["k" * 20, "o" * 20]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
THOUGHT = "<think>\nHm, so it is, and so will it be.</think>\n\nParis."
STEERED = {"reasoning_control": True}


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A model that opens its reasoning by itself, and two tenants."""
    folder = tmp_path_factory.mktemp("reasoning")
    build_tokenizer(folder, template=TOOL_TEMPLATE, added=TOOL_TOKENS)
    tenants = folder / "tenants.toml"
    tenants.write_text(f'[tenants.one]\nkeys = ["{KEYS[0]}"]\n[tenants.other]\nkeys = ["{KEYS[1]}"]\n')
    settings = HttpSettings(tenants=Tenants(path=tenants))
    async with run_gateway(ChatTokenizer(folder), settings, key=KEYS[0]) as gateway:
        gateway.script.script = lambda spec: [
            *gateway.tokenizer.encode(THOUGHT, add_special_tokens=False),
            *gateway.tokenizer.eos_ids[:1],
        ]
        yield gateway


@pytest.fixture
async def gateway(gateway: Gateway) -> Gateway:
    gateway.script.max_model_len = 4096
    gateway.script.hold_after = gateway.script.per_event = 6
    return gateway


async def begin(gateway: Gateway, **fields: Any) -> tuple[str, str, Any]:
    """An answer whose choices think: its id, the reasoning so far, the rest of its stream."""
    stream = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, max_tokens=80, extra_body=fields
    )
    chunks = aiter(stream)
    thoughts = dict[int, str]()
    async for chunk in chunks:
        if thought := reasoning_of(chunk):
            thoughts[chunk.choices[0].index] = thought
        if len(thoughts) == fields.get("n", 1):
            return chunk.id, thoughts[0], chunks
    raise AssertionError("it did not think")


def reasoning_of(chunk: Any) -> str:
    return getattr(chunk.choices[0].delta, "reasoning_content", None) or ""


async def end(gateway: Gateway, answer: str, key: str = KEYS[0], **fields: Any) -> tuple[int, Any]:
    body = {"id": answer, "action": "reasoning_end"} | fields
    told = await gateway.http.post(CONTROL, json=body, headers={"authorization": f"Bearer {key}"})
    return told.status_code, told.json()


async def rest(gateway: Gateway, chunks: Any) -> tuple[str, str]:
    """What else it thinks, and its content: that of its choices in order."""
    gateway.script.release.set()
    found = sorted([chunk async for chunk in chunks], key=lambda chunk: chunk.choices[0].index)
    return "".join(map(reasoning_of, found)), "".join(chunk.choices[0].delta.content or "" for chunk in found)


@pytest.mark.parametrize("n", [1, 2])
async def test_what_was_thought_stays_and_the_content_follows(gateway: Gateway, n: int) -> None:
    answer, thought, chunks = await begin(gateway, n=n, **STEERED)
    generations = list(gateway.script.running.values())
    assert await end(gateway, answer) == (200, {"success": True})
    closing = gateway.tokenizer.encode("</think>", add_special_tokens=False)
    for generation in generations:
        assert generation.followed is not None
        assert (generation.followed.text, generation.followed.after) == ("", closing)
    more, content = await rest(gateway, chunks)
    assert content == "Paris." * n
    assert (THOUGHT.removeprefix("<think>\n").startswith(thought), "will it be" in thought + more) == (True, False)
    assert (await end(gateway, answer))[0] == 404
    assert len(gateway.script.submitted) == n


async def test_what_else_the_answer_must_follow_holds_behind_the_reasoning(gateway: Gateway) -> None:
    answer, _, chunks = await begin(gateway, structured_outputs={"choice": ["Paris."]}, **STEERED)
    [generation] = gateway.script.running.values()
    before = generation.followed
    assert await end(gateway, answer) == (200, {"success": True})
    assert (before is not None, generation.followed != before, generation.followed is not None) == (True, True, True)
    assert generation.followed is not None
    assert ("Paris" in generation.followed.text, "think" in generation.followed.text) == (True, False)
    assert (await rest(gateway, chunks))[1] == "Paris."


async def test_an_answer_that_thinks_no_more_says_so(gateway: Gateway) -> None:
    gateway.script.per_event = 1
    gateway.script.hold_after = len(gateway.tokenizer.encode(THOUGHT, add_special_tokens=False)) - 1
    answer, _, chunks = await begin(gateway, **STEERED)
    async for chunk in chunks:
        if chunk.choices[0].delta.content:
            break
    assert await end(gateway, answer) == (200, {"success": False})
    await rest(gateway, chunks)


async def test_who_did_not_ask_for_it_hears_how_and_nobody_ends_another_s(gateway: Gateway) -> None:
    plain, _, chunks = await begin(gateway)
    status, told = await end(gateway, plain)
    assert (status, told["error"]["param"], "reasoning_control" in told["error"]["message"]) == (
        400, "reasoning_control", True,
    )  # fmt: skip
    steered, _, others = await begin(gateway, **STEERED)
    for name, key in ((steered, KEYS[1]), ("chatcmpl-none", KEYS[0])):
        status, told = await end(gateway, name, key)
        assert (status, told["error"]["type"], told["error"]["param"]) == (404, "not_found_error", "id")
    for wrong in ({"action": "stop"}, {"id": ""}, {"more": 1}):
        assert (await end(gateway, steered, **wrong))[0] == 400
    for each in (chunks, others):
        assert "will it be" in (await rest(gateway, each))[0]


async def test_it_goes_with_a_request_whose_end_can_be_told(gateway: Gateway) -> None:
    body = {"model": MODEL, "messages": HELLO, "ignore_eos": True, **STEERED}
    refused = await gateway.http.post(CHAT, json=body, headers={"authorization": f"Bearer {KEYS[0]}"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_control")
