"""Chat and completions as the official client sees them: every field, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.answers.start import choice_seed
from tests.unit.gateway.conftest import MODEL, TEXT, Gateway

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
Answer = tuple[str, str | None, Any]  # text, finish reason, usage


async def chat(gateway: Gateway, **options: Any) -> Any:
    return await gateway.openai.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | options))


async def complete(gateway: Gateway, **options: Any) -> Any:
    return await gateway.openai.completions.create(**({"model": MODEL, "prompt": "Hello"} | options))


async def answer(gateway: Gateway, route: str, *, stream: bool, **options: Any) -> Answer:
    """The first choice's text and finish reason, and usage, whichever way they came."""
    call = chat if route == "chat" else complete
    if not stream:
        whole = await call(gateway, **options)
        choice = whole.choices[0]
        return choice.message.content if route == "chat" else choice.text, choice.finish_reason, whole.usage
    text, finish, usage = "", None, None
    options = {"stream_options": {"include_usage": True}} | options
    async for chunk in await call(gateway, stream=True, **options):
        assert chunk.usage is None or not chunk.choices
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.delta.content if route == "chat" else choice.text) or ""
            finish = choice.finish_reason or finish
    return text, finish, usage


both_routes = pytest.mark.parametrize("route", ["chat", "completions"])
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@both_routes
@both_ways
async def test_text_finish_and_usage(gateway: Gateway, route: str, stream: bool) -> None:
    gateway.script.cached_tokens = 3
    text, finish, usage = await answer(gateway, route, stream=stream)
    assert (text, finish) == (TEXT, "stop")
    assert usage.prompt_tokens == len(gateway.script.submitted[-1].token_ids)
    assert usage.completion_tokens == len(gateway.tokenizer.encode(TEXT)) + 1  # the stop token counts
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert gateway.script.cancelled == {}


@both_routes
@both_ways
@pytest.mark.parametrize("per_event", [1, 5, 100])
async def test_a_stop_string_across_tokens_ends_the_text(
    gateway: Gateway, route: str, stream: bool, per_event: int
) -> None:
    gateway.script.per_event = per_event
    text, finish, _ = await answer(gateway, route, stream=stream, stop=["no such", " is Par"])
    assert (text, finish) == ("The capital of France", "stop")
    assert gateway.script.running == {}
    included = {"include_stop_str_in_output": True}
    text, _, _ = await answer(gateway, route, stream=stream, stop=" is Par", extra_body=included)
    assert text == "The capital of France is Par"


@both_routes
@both_ways
async def test_max_tokens_ends_with_length(gateway: Gateway, route: str, stream: bool) -> None:
    text, finish, usage = await answer(gateway, route, stream=stream, max_tokens=3)
    assert finish == "length"
    assert usage.completion_tokens == 3
    assert TEXT.startswith(text)


@both_routes
@both_ways
async def test_a_character_cut_by_max_tokens_is_replaced_at_the_end_only(
    gateway: Gateway, route: str, stream: bool
) -> None:
    ids = gateway.tokenizer.encode("🙂")
    assert len(ids) > 1
    gateway.script.script = lambda spec: ids
    assert (await answer(gateway, route, stream=stream, max_tokens=len(ids) - 1))[0] == "\ufffd"
    assert (await answer(gateway, route, stream=stream))[0] == "🙂"


@both_routes
@both_ways
async def test_every_field_reaches_the_generation(gateway: Gateway, route: str, stream: bool) -> None:
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 2, "stop_token_ids": [300, 301]}
    extra |= {"typical_p": 0.7, "cache_salt": "tenant", "priority": 5, "timeout": 12.5}
    await answer(
        gateway, route, stream=stream, temperature=0.5, top_p=0.9, max_tokens=20, seed=11, presence_penalty=-2,
        frequency_penalty=2, logit_bias={"40": -100, "41": 3.5}, extra_body=extra,
    )  # fmt: skip
    spec = gateway.script.submitted[-1]
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert sampling.typical_p == 0.7
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 2, 1.3)
    assert sampling.logit_bias == {40: -100, 41: 3.5}
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (11, 20, 2)
    assert sampling.stop_token_ids == [*gateway.tokenizer.eos_ids, 300, 301]
    assert sampling.logprobs is None
    assert (spec.sharing.salt, spec.priority, spec.deadline_s) == ("client:tenant", 5, 12.5)


async def test_defaults(gateway: Gateway) -> None:
    await chat(gateway)
    await chat(gateway)
    first, second = [spec.sampling for spec in gateway.script.submitted]
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.repetition_penalty) == (1, 1, 0, 0, 1)
    assert first.max_tokens == gateway.script.max_model_len - len(gateway.script.submitted[0].token_ids)
    assert first.seed != second.seed


async def test_ignore_eos_and_special_tokens(gateway: Gateway) -> None:
    eos = gateway.tokenizer.eos_ids[0]
    gateway.script.script = lambda spec: [*gateway.tokenizer.encode("a"), eos, *gateway.tokenizer.encode("b")]
    assert (await chat(gateway)).choices[0].message.content == "a"
    ignored = await chat(gateway, extra_body={"ignore_eos": True})
    assert (ignored.choices[0].message.content, ignored.choices[0].finish_reason) == ("ab", "length")
    shown = await chat(gateway, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert shown.choices[0].message.content == "a<|im_end|>b"
    stopped = await chat(gateway, extra_body={"stop_token_ids": gateway.tokenizer.encode("a")})
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("", "stop")


async def test_min_tokens_keeps_stop_strings_off(gateway: Gateway) -> None:
    early = await chat(gateway, stop=["c"], extra_body={"min_tokens": 0})
    assert early.choices[0].message.content == "The "
    ids = gateway.tokenizer.encode(TEXT)
    later = await chat(gateway, stop=["c"], extra_body={"min_tokens": len(gateway.tokenizer.encode("The ca"))})
    assert later.choices[0].message.content.startswith("The ca")
    assert later.usage.completion_tokens < len(ids)


@both_ways
async def test_choices_are_numbered_and_draw_from_their_own_seeds(gateway: Gateway, stream: bool) -> None:
    texts = ["one", "two", "three"]
    seeds = {choice_seed(5, index): text for index, text in enumerate(texts)}
    gateway.script.script = lambda spec: gateway.tokenizer.encode(seeds[spec.sampling.seed])
    got = dict.fromkeys(range(3), "")
    if stream:
        order = []
        async for chunk in await chat(gateway, n=3, seed=5, stream=True):
            for choice in chunk.choices:
                got[choice.index] += choice.delta.content or ""
                order.append(choice.index)
        assert order != sorted(order)  # they interleave
    else:
        whole = await chat(gateway, n=3, seed=5)
        got = {choice.index: choice.message.content for choice in whole.choices}
        assert whole.usage.completion_tokens == sum(len(gateway.tokenizer.encode(text)) for text in texts)
        assert whole.usage.prompt_tokens == len(gateway.script.submitted[-1].token_ids)
    assert got == dict(enumerate(texts))
    assert seeds.keys() == {5, choice_seed(5, 1), choice_seed(5, 2)}


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1])
async def test_a_seed_is_64_bits(gateway: Gateway, seed: int) -> None:
    await chat(gateway, seed=seed)
    assert gateway.script.submitted[-1].sampling.seed == seed % 2**64


async def test_the_stream_begins_with_the_role_and_ends_with_done(gateway: Gateway) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 2}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert '"delta":{"role":"assistant"' in lines[0]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    assert not any('"usage"' in line for line in lines)


@both_ways
async def test_chat_logprobs(gateway: Gateway, stream: bool) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    if stream:
        content = []
        async for chunk in await chat(gateway, stream=True, **options):
            for choice in chunk.choices:
                content += choice.logprobs.content if choice.logprobs else []
    else:
        content = (await chat(gateway, **options)).choices[0].logprobs.content
    assert gateway.script.submitted[-1].sampling.logprobs == 2
    assert bytes(byte for entry in content[:-1] for byte in entry.bytes).decode() == TEXT  # across characters' halves
    assert content[-1].token == "<|im_end|>"
    assert all(entry.logprob == entry.top_logprobs[0].logprob == -0.5 for entry in content)
    assert {len(entry.top_logprobs) for entry in content} == {2}
    assert not (await chat(gateway, logprobs=True)).choices[0].logprobs.content[0].top_logprobs
    named = (await chat(gateway, logprobs=True, extra_body={"return_tokens_as_token_ids": True})).choices[0]
    assert named.logprobs.content[-1].token == f"token_id:{gateway.tokenizer.encode('<|im_end|>')[0]}"


@both_ways
async def test_completion_logprobs(gateway: Gateway, stream: bool) -> None:
    plain = "The capital of France"
    gateway.script.script = lambda spec: gateway.tokenizer.encode(plain)
    tokens, values, tops, offsets = [], [], [], []
    options: dict[str, Any] = {"logprobs": 1, "stop": ["France of"]}  # text is held back meanwhile
    if stream:
        parts = [choice async for chunk in await complete(gateway, stream=True, **options) for choice in chunk.choices]
    else:
        parts = (await complete(gateway, **options)).choices
    for part in parts:
        tokens += part.logprobs.tokens
        values += part.logprobs.token_logprobs
        tops += part.logprobs.top_logprobs
        offsets += part.logprobs.text_offset
    assert "".join(tokens) == plain
    assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]
    assert values == [-0.5] * len(tokens)
    assert tops == [{token: -0.5} for token in tokens]


@both_ways
@pytest.mark.parametrize("prompt", ["Hello", ["one", "two"], [5, 6, 7], [[5, 6], [7]]], ids=str)
async def test_every_form_of_prompt(gateway: Gateway, stream: bool, prompt: Any) -> None:
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    ids = [gateway.tokenizer.encode(entry) if isinstance(entry, str) else entry for entry in prompts]
    answers = dict.fromkeys(range(2 * len(prompts)), "")
    options: dict[str, Any] = {"prompt": prompt, "n": 2, "echo": True, "extra_body": {"best_of": 2}}
    if stream:
        async for chunk in await complete(gateway, stream=True, **options):
            for choice in chunk.choices:
                answers[choice.index] += choice.text
    else:
        whole = await complete(gateway, **options)
        answers = {choice.index: choice.text for choice in whole.choices}
        assert whole.usage.prompt_tokens == sum(map(len, ids))
    assert [spec.token_ids for spec in gateway.script.submitted] == [entry for entry in ids for _ in range(2)]
    echoes = [gateway.tokenizer.decode(entry, skip_special_tokens=False) for entry in ids for _ in range(2)]
    assert answers == {index: echo + TEXT for index, echo in enumerate(echoes)}


async def test_token_ids_on_request(gateway: Gateway) -> None:
    whole = await chat(gateway, extra_body={"return_token_ids": True})
    ids = [*gateway.tokenizer.encode(TEXT), *gateway.tokenizer.eos_ids]
    assert whole.choices[0].token_ids == ids
    streamed = []
    async for chunk in await chat(gateway, stream=True, extra_body={"return_token_ids": True}):
        for choice in chunk.choices:
            streamed += getattr(choice, "token_ids", None) or []
    assert streamed == ids


async def test_messages_become_the_prompt(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    first = await chat(gateway, messages=[{"role": "developer", "content": "Be"}, {"role": "user", "content": parts}])
    echoed = first.choices[0].message.model_dump()  # what clients send back: with nulls
    await chat(gateway, messages=[*MESSAGES, echoed], max_completion_tokens=4, max_tokens=9)
    rendered = [
        gateway.tokenizer.decode(spec.token_ids, skip_special_tokens=False) for spec in gateway.script.submitted
    ]
    assert rendered[0] == (
        "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert f"<|im_start|>assistant\n{TEXT}<|im_end|>\n<|im_start|>assistant\n" in rendered[1]
    assert gateway.script.submitted[1].sampling.max_tokens == 4


async def test_the_final_message_can_be_continued(gateway: Gateway) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital "}]
    await chat(gateway, messages=messages, extra_body={"continue_final_message": True})
    await chat(gateway, messages=messages, extra_body={"add_generation_prompt": False})
    rendered = [
        gateway.tokenizer.decode(spec.token_ids, skip_special_tokens=False) for spec in gateway.script.submitted
    ]
    assert rendered[0].endswith("<|im_start|>assistant\nThe capital ")
    assert rendered[1].endswith("<|im_start|>assistant\nThe capital <|im_end|>\n")


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me"}, {"metadata": {"a": "b"}}, {"store": False}, {"store": True},
        {"service_tier": "default"}, {"service_tier": "flex"}, {"top_p": 0}, {"max_tokens": 5.0}, {"length_penalty": 1.0},
        {"top_logprobs": 0}, {"stream_options": {"include_usage": True}}, {"verbosity": "low"},
        {"prediction": None}, {"speculation": True}, {"speculation": None},
        {"prompt_cache_retention": "24h"}, {"prompt_cache_options": {}}, {"request_id": "r"},
        {"safety_identifier": "x"}, {"prompt_cache_key": "k"},
        {"parallel_tool_calls": False}, {"modalities": ["text"]}, {"response_format": {"type": "text"}},
        {"tool_choice": "none"}, {"tool_choice": "auto", "tools": []}, {"stream": None, "stop": None, "seed": None},
        {"reasoning_effort": None, "functions": None, "audio": None}, {"logprobs": False},
        {"chat_template_kwargs": {"enable_thinking": False}}, {"use_beam_search": False},
    ],
    ids=lambda fields: "+".join(fields),
)  # fmt: skip
async def test_what_changes_nothing_is_accepted(gateway: Gateway, harmless: dict[str, Any]) -> None:
    response = await gateway.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, "max_tokens": 2} | harmless
    )
    assert response.status_code == 200, response.text


COUNTS = ("cache_n", "prompt_n", "predicted_n")
PACES = tuple(f"{name}_{what}" for name in ("prompt", "predicted") for what in ("ms", "per_token_ms", "per_second"))


@both_routes
async def test_timings_come_when_asked_for_under_llama_cpp_s_names(gateway: Gateway, route: str) -> None:
    gateway.script.cached_tokens = 3
    call = chat if route == "chat" else complete
    assert not hasattr(await call(gateway), "timings")
    whole = await call(gateway, extra_body={"timings_per_token": True})
    assert whole.timings.keys() == {*COUNTS, *PACES, "ttft_ms"}
    counts = [whole.timings[name] for name in COUNTS]
    assert counts == [3, whole.usage.prompt_tokens - 3, whole.usage.completion_tokens]
    for options in ({"include_timings": True}, {"include_timings": True, "include_usage": True}):
        found = [chunk async for chunk in await call(gateway, stream=True, extra_body={"stream_options": options})]
        assert [hasattr(chunk, "timings") for chunk in found] == [False] * (len(found) - 1) + [True]
        assert [found[-1].timings[name] for name in COUNTS] == counts
        assert found[-1].choices == []
        assert (found[-1].usage is not None) == ("include_usage" in options)
    found = [chunk async for chunk in await call(gateway, stream=True, extra_body={"timings_per_token": True})]
    said = [chunk.timings["predicted_n"] for chunk in found if hasattr(chunk, "timings")]
    assert said == sorted(said)
    assert said[-1] == counts[-1]
