"""Anthropic's Messages over HTTP: whole and streamed, counted, refused, and found again in a prefix cache."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.blocks import hash_blocks, hash_root
from common.errors import (
    DeadlineExceededError,
    OverloadedError,
    RateLimitedError,
    ServingError,
    UnavailableError,
    WorkerFailedError,
)
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.tenants.tenants import Tenants
from tests.fakes.generations import ScriptedGenerations
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway
from tests.unit.gateway.dialects.message_stream import events_of, message_of

SECRET = "the-key-of-a-messages-client"
HEADERS = {"x-api-key": SECRET, "anthropic-version": "2023-06-01", "anthropic-beta": "no-such-beta-2099-01-01"}
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
SAID = f"<think>A city.</think>Let me look.{CALL}"
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a place",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ROOT = hash_root(model="demo", kv_dtype="float32", block_size=16)
TEXT_BLOCK = {"type": "text", "text": "Let me look."}


@pytest.fixture(scope="module")
async def server(demo: ChatTokenizer) -> AsyncIterator[Gateway]:
    async with run_gateway(
        demo, HttpSettings(tenants=Tenants(api_keys=[SECRET]), max_body_bytes=100_000), key=SECRET
    ) as gateway:
        gateway.http.headers.update(HEADERS)
        yield gateway


@pytest.fixture
async def messages(server: Gateway) -> Gateway:
    """The module's gateway with a fresh script, which says `SAID`."""
    tokenizer = server.tokenizer
    fresh = ScriptedGenerations(lambda spec: [*tokenizer.encode(SAID), *tokenizer.eos_ids])
    fresh.max_model_len = 2048
    vars(server.script).update(vars(fresh))
    return server


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]} | fields


async def ask(gateway: Gateway, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """The message, whichever way it came."""
    answer = await gateway.http.post(PATH, json=body(stream=stream, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    whole: dict[str, Any] = message_of(answer.text) if stream else answer.json()
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    assert whole["id"].startswith("msg_")
    return whole


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@both_ways
@pytest.mark.parametrize("per_event", [1, 4, 100])
async def test_thinking_text_and_a_call_are_blocks(messages: Gateway, stream: bool, per_event: int) -> None:
    messages.script.per_event, messages.script.cached_tokens = per_event, 5
    message = await ask(messages, stream=stream, tools=[WEATHER])
    thinking, text, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "A city.")
    assert thinking["signature"]
    assert text == TEXT_BLOCK
    assert call == {"type": "tool_use", "id": call["id"], "name": "get_weather", "input": {"city": "Rome"}}
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage, prompt = message["usage"], messages.script.submitted[-1].token_ids
    assert usage["cache_read_input_tokens"] == 5
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == len(
        prompt
    )
    assert usage["output_tokens"] == len(messages.tokenizer.encode(SAID)) + 1
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]
    assert usage["service_tier"] == "standard"
    assert messages.script.running == {}


async def test_a_stream_begins_with_what_was_found_and_a_ping(messages: Gateway) -> None:
    messages.script.cached_tokens = 5
    answer = await messages.http.post(PATH, json=body(stream=True))
    assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
    first, second, third, *_ = events_of(answer.text)
    assert first["message"]["usage"]["cache_read_input_tokens"] == 5
    assert second == {"type": "ping"}
    assert third == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "thinking", "thinking": "", "signature": ""},
    }


@both_ways
@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "said"),
    [
        ({"thinking": {"type": "disabled"}}, "end_turn", None, ["thinking", "text"]),
        ({"stop_sequences": ["me lo"]}, "stop_sequence", "me lo", ["thinking", "text"]),
        ({"max_tokens": 3}, "max_tokens", None, ["thinking"]),
        ({"max_tokens": 0}, "max_tokens", None, []),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "end_turn", None, ["text"]),
        ({"tools": [WEATHER]}, "tool_use", None, ["thinking", "text", "tool_use"]),
    ],
)
async def test_why_an_answer_ends(
    messages: Gateway, stream: bool, fields: dict[str, Any], reason: str, sequence: str | None, said: list[str]
) -> None:
    message = await ask(messages, stream=stream, **fields)
    assert (message["stop_reason"], message["stop_sequence"], kinds(message)) == (reason, sequence, said)


@both_ways
async def test_more_tokens_than_the_context_has_are_cut(messages: Gateway, stream: bool) -> None:
    """Coding agents ask for 32,000 whatever the model; the answer says if it ended there."""
    message = await ask(messages, stream=stream, max_tokens=32_000)
    assert message["stop_reason"] == "end_turn"
    prompt = messages.script.submitted[-1].token_ids
    assert messages.script.submitted[-1].sampling.max_tokens == 2048 - len(prompt)
    messages.script.max_model_len = len(prompt) + 2
    message = await ask(messages, stream=stream, max_tokens=32_000)
    assert message["stop_reason"] == "model_context_window_exceeded"


@both_ways
async def test_a_call_that_is_cut_off_has_what_was_complete(messages: Gateway, stream: bool) -> None:
    cut = len(messages.tokenizer.encode(SAID.partition('e"}}')[0]))
    answer = await messages.http.post(PATH, json=body(stream=stream, tools=[WEATHER], max_tokens=cut))
    if stream:
        parts = [one["delta"].get("partial_json", "") for one in events_of(answer.text) if "delta" in one]
        assert '{"city": "Rome"}'.startswith("".join(parts).strip())
        assert '"max_tokens"' in answer.text
        return
    message = answer.json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["name"] == "get_weather"
    assert isinstance(message["content"][-1]["input"], dict)


async def test_every_field_reaches_the_generation(messages: Gateway) -> None:
    await ask(messages, stream=False, temperature=0.5, top_p=0.9, top_k=7, max_tokens=20)
    sampling = messages.script.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 20)
    await ask(messages, stream=False, tools=[WEATHER], tool_choice={"type": "any"})
    required = messages.script.submitted[-1].grammar
    assert required is not None
    for name in ("output_config", "output_format"):
        format_ = {"type": "json_schema", "schema": WEATHER["input_schema"]}
        await ask(messages, stream=False, **{name: {"format": format_} if name == "output_config" else format_})
        assert messages.script.submitted[-1].grammar is not None


async def test_a_turn_comes_back_as_it_was_said(messages: Gateway) -> None:
    """What an answer says, sent back with its result, is rendered as the model wrote it."""
    message = await ask(messages, stream=True, tools=[WEATHER])
    called = message["content"][-1]
    result = {"type": "tool_result", "tool_use_id": called["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns = [
        *body()["messages"],
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    await ask(messages, stream=False, tools=[WEATHER], messages=turns)
    shown = messages.tokenizer.decode(messages.script.submitted[-1].token_ids, skip_special_tokens=False)
    assert f"Let me look.{CALL}<|im_end|>" in shown
    assert "<|im_start|>tool\n<tool_response>sunny</tool_response><|im_end|>" in shown
    assert message["id"] not in shown


# -- counting, models, batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": [{"type": "text", "text": "Be brief."}], "tools": [WEATHER], "tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [*body()["messages"], {"role": "assistant", "content": "The best is ("}]},
    ],
    ids=["plain", "tools", "thinking", "prefilled"],
)
async def test_a_count_is_what_the_usage_will_say(messages: Gateway, fields: dict[str, Any]) -> None:
    counted = await messages.http.post(
        COUNT, json={name: value for name, value in body(**fields).items() if name != "max_tokens"}
    )
    usage = (await ask(messages, stream=False, **fields))["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"]}
    assert counted.headers["request-id"]


async def test_models_are_told_in_the_form_of_who_asks(messages: Gateway) -> None:
    listed = (await messages.http.get("/v1/models")).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
    (card,) = listed["data"]
    assert card.items() >= {"type": "model", "id": MODEL, "display_name": MODEL, "max_input_tokens": 2048}.items()
    assert (await messages.http.get(f"/v1/models/{MODEL}")).json() == card
    assert (await messages.http.get("/v1/models", params={"after_id": MODEL})).json()["data"] == []
    wrong = await messages.http.get("/v1/models", params={"limit": "0"})
    assert wrong.json()["error"] == {"type": "invalid_request_error", "message": "limit: must be 1 to 1000"}
    missing = await messages.http.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


async def test_its_batches_say_where_batches_are(messages: Gateway) -> None:
    asked = [
        await messages.http.post(f"{PATH}/batches", json={"requests": []}),
        await messages.http.get(f"{PATH}/batches/b1"),
    ]
    for answer in asked:
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        assert "/v1/batches" in answer.json()["error"]["message"]


# -- errors ------------------------------------------------------------------------------------------------------------


def limited() -> ServingError:
    return RateLimitedError("spent", what="requests", retry_after_s=7, headers={})


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (OverloadedError("full", retry_after_s=7), 529, "overloaded_error"),
        (UnavailableError("nobody"), 529, "overloaded_error"),
        (limited(), 429, "rate_limit_error"),
        (DeadlineExceededError("late"), 504, "timeout_error"),
        (WorkerFailedError("broke"), 500, "api_error"),
    ],
)
async def test_errors_have_their_type_before_and_within_a_stream(
    messages: Gateway, error: ServingError, status: int, kind: str
) -> None:
    messages.script.refuse = error
    answer = await messages.http.post(PATH, json=body())
    assert (answer.status_code, answer.json()["error"]) == (status, {"type": kind, "message": error.message})
    assert answer.json()["request_id"] == answer.headers["request-id"]
    assert ("retry-after" in answer.headers) == (status in (429, 529))
    messages.script.refuse, messages.script.fail, messages.script.fail_after = None, error, 2
    broken = await messages.http.post(PATH, json=body(stream=True))
    assert events_of(broken.text)[-1] == {"type": "error", "error": {"type": kind, "message": error.message}}
    assert messages.script.running == {}


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"headers": {"x-api-key": ""}}, 401, "authentication_error"),
        ({"json": {"no_such": 1}}, 400, "invalid_request_error"),
        ({"json": body(model="other")}, 404, "not_found_error"),
        ({"content": b"x" * 100_001}, 413, "request_too_large"),
        ({"method": "GET"}, 405, "invalid_request_error"),
        ({"url": f"{PATH}/nothing"}, 404, "not_found_error"),
    ],
)
async def test_refusals_have_its_form(messages: Gateway, change: dict[str, Any], status: int, kind: str) -> None:
    asked: dict[str, Any] = {"method": "POST", "url": PATH} | ({} if "content" in change else {"json": body()})
    answer = await messages.http.request(**(asked | change))
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert answer.json()["request_id"] == answer.headers["request-id"]


async def test_a_client_that_wants_its_conversation_kept_is_told_so_that_it_sends_all_of_it(messages: Gateway) -> None:
    refused = await messages.http.post(PATH, json=body(thread={"type": "create"}))
    assert refused.status_code == 400
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}


@pytest.mark.parametrize("words", [2_100, 9_000], ids=["counted", "counted in part"])
async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for(
    messages: Gateway, words: int
) -> None:
    """Claude Code compacts its conversation then, by the two numbers."""
    long = body(messages=[{"role": "user", "content": "word " * words}])
    answer = await messages.http.post(PATH, json=long)
    assert answer.status_code == 400
    found = re.fullmatch(
        r"prompt is too long: (?:at least )?(\d+) tokens > 2048 maximum", answer.json()["error"]["message"]
    )
    assert found is not None, answer.text
    assert int(found[1]) > 2048


async def test_a_bearer_token_is_a_key_too(messages: Gateway) -> None:
    headers = {"x-api-key": "", "authorization": f"Bearer {SECRET}"}
    assert (await messages.http.post(PATH, json=body(), headers=headers)).status_code == 200


# -- prefixes ----------------------------------------------------------------------------------------------------------


def turn_of_an_agent(nonce: str, messages: list[Any]) -> dict[str, Any]:
    """A request as Claude Code makes it: a nonce before all, and cache marks that move on with the conversation."""
    marked = {"cache_control": {"type": "ephemeral"}}
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch={nonce};"},
        {"type": "text", "text": "You are an agent that writes programs." + " Be careful." * 40} | marked,
    ]
    last = messages[-1]
    ends = {"role": last["role"], "content": [{"type": "text", "text": last["content"]} | marked]}
    return body(system=system, tools=[WEATHER, WEATHER | {"name": "read_file"}], messages=[*messages[:-1], ends])


async def test_the_second_request_of_an_agent_finds_its_prefix(messages: Gateway) -> None:
    """Every whole block before the new turn has the hash that it had, though the nonce changed and the marks moved."""
    said = {"role": "user", "content": "Fix the test." + " It is in tests." * 20}
    tokenizer = messages.tokenizer
    messages.script.script = lambda spec: [*tokenizer.encode("Done."), *tokenizer.eos_ids]
    assert (await messages.http.post(PATH, json=turn_of_an_agent("a1b2c", [said]))).status_code == 200
    reminder = {"role": "system", "content": "The list of tasks is empty."}
    turns = [said, {"role": "assistant", "content": "Done."}, reminder, {"role": "user", "content": "And now?"}]
    assert (await messages.http.post(PATH, json=turn_of_an_agent("ffffe", turns))).status_code == 200
    first, second = (hash_blocks(ROOT, spec.token_ids, 16) for spec in messages.script.submitted[-2:])
    assert len(first) > 20
    assert second[: len(first)] == first
    assert "ffffe" not in json.dumps(
        tokenizer.decode(messages.script.submitted[-1].token_ids, skip_special_tokens=False)
    )
