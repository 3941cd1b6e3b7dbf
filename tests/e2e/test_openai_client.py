"""The official `openai` client, unchanged, against the whole of Baton in separate processes."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator

import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.cluster import Cluster
from tests.models import CALL_TEMPLATE, TOOL_TOKENS, build_tiny_model, build_tokenizer

MESSAGES = [{"role": "user", "content": "Tell me about blocks, please."}]


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("openai")
    model = build_tiny_model(folder / "model", "llama")
    build_tokenizer(model, template=CALL_TEMPLATE, added=TOOL_TOKENS[:2])
    async with Cluster(folder / "run", model=model, transport="shm") as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def model(client: openai.AsyncOpenAI) -> str:
    return (await client.models.list()).data[0].id


async def chat(client: openai.AsyncOpenAI, name: str, **options: object) -> object:
    return await client.chat.completions.create(
        **({"model": name, "messages": MESSAGES, "max_tokens": 16, "seed": 1} | options)  # type: ignore[arg-type]
    )


async def test_streamed_and_whole_answers_agree(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await chat(client, model)
    stream = await chat(client, model, stream=True, stream_options={"include_usage": True})
    pieces, finish, usage = [], None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    assert "".join(pieces) == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.3, "top_p": 0.8},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {"40": 100}},
        {"max_completion_tokens": 3, "max_tokens": openai.omit},
        {"extra_body": {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.2}},
        {"extra_body": {"ignore_eos": True, "min_tokens": 4, "stop_token_ids": [300]}},
    ],
    ids=lambda options: "+".join(options) if "extra_body" not in options else "+".join(options["extra_body"]),
)
async def test_the_same_seed_gives_the_same_answer(client: openai.AsyncOpenAI, model: str, options: dict) -> None:
    first, second = await chat(client, model, **options), await chat(client, model, **options)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert 0 < first.usage.completion_tokens <= 16


async def test_logit_bias_decides(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await chat(client, model, temperature=0, logit_bias={"40": 100}, logprobs=True, top_logprobs=2)
    tokens = {entry.token for entry in answer.choices[0].logprobs.content}
    assert len(tokens) == 1
    assert all(len(entry.top_logprobs) == 2 for entry in answer.choices[0].logprobs.content)


async def test_logprobs_of_greedy_tokens_are_the_top_ones(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await chat(client, model, temperature=0, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert entry.token == entry.top_logprobs[0].token


async def test_a_text_is_as_likely_as_it_was_when_it_was_written(client: openai.AsyncOpenAI, model: str) -> None:
    """Computed by prefill in chunks, never from the cache, and carried beside the first token."""
    prompt = [token % 300 + 20 for token in range(150)]
    options = {"model": model, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    said = (await client.completions.create(**options, prompt=prompt, max_tokens=12, temperature=0)).choices[0]
    whole = prompt + said.model_extra["token_ids"]
    for max_tokens in (0, 2):  # computed by a prefill worker alone, and handed over
        scored = await client.completions.create(**options, prompt=whole, max_tokens=max_tokens, echo=True)
        assert scored.usage.completion_tokens == max_tokens
        again = scored.choices[0].logprobs
        assert len(again.tokens) == len(whole) + max_tokens
        expected = said.logprobs.token_logprobs
        assert again.token_logprobs[len(prompt) : len(whole)] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("n", [1, 2])
async def test_what_is_said_of_a_prompt_changes_nothing_of_the_answer(
    client: openai.AsyncOpenAI, model: str, n: int
) -> None:
    prompt = [token % 300 + 20 for token in range(70)]
    options = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 4, "n": n}
    plain = await client.completions.create(**options)
    scored = await client.completions.create(**options, extra_body={"prompt_logprobs": 1})
    for one, other in zip(plain.choices, scored.choices, strict=True):
        assert len(other.model_extra["prompt_logprobs"]) == len(prompt)
        assert other.logprobs.tokens == one.logprobs.tokens
        assert other.logprobs.token_logprobs == pytest.approx(one.logprobs.token_logprobs, abs=1e-3)
        check_distributions(other.logprobs.top_logprobs)
    pieces = await client.completions.create(**options, echo=True, stream=True)
    streamed: dict[int, list[float]] = {index: [] for index in range(n)}
    async for piece in pieces:
        for choice in piece.choices:
            streamed[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    for choice in plain.choices:
        assert streamed[choice.index][len(prompt) :] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)


def check_distributions(rows: list[dict[str, float]]) -> None:
    """Each row's tokens are of one distribution: together they are never likelier than 1."""
    assert all(sum(math.exp(logprob) for logprob in row.values()) < 1 + 1e-6 for row in rows)


async def test_a_stop_string_across_tokens_ends_the_answer(client: openai.AsyncOpenAI, model: str) -> None:
    whole = (await chat(client, model, temperature=0, max_tokens=24)).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    cut = await chat(client, model, temperature=0, max_tokens=24, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


async def test_n_choices_differ_and_are_numbered(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await chat(client, model, n=3, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


async def test_cached_tokens_tell_the_truth(client: openai.AsyncOpenAI, model: str) -> None:
    prompt = "a prompt that nobody else sends, long enough for several blocks of sixteen tokens: " + "xyz " * 40
    first = await client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
    second = await client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (second.usage.prompt_tokens - 1) // 16 * 16
    assert second.choices[0].text == first.choices[0].text


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"temperature": 9}, 400, "temperature"),
        ({"top_p": 2}, 400, "top_p"),
        ({"logit_bias": {"999999": 1}}, 400, "logit_bias"),
        ({"n": 1000}, 400, "n"),
        ({"messages": []}, 400, "messages"),
        ({"extra_body": {"no_such_field": 1}}, 400, "no_such_field"),
        ({"model": "another"}, 404, "model"),
        ({"max_tokens": -1}, 400, "max_tokens"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
async def test_wrong_input_is_named(
    client: openai.AsyncOpenAI, model: str, options: dict, status: int, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        await chat(client, model, **options)
    assert raised.value.status_code == status
    assert raised.value.body["param"] == param
    assert raised.value.body["message"]


async def test_the_whole_context_can_be_used_and_no_more(client: openai.AsyncOpenAI, model: str) -> None:
    prompt = [20] * 1000
    answer = await client.completions.create(model=model, prompt=prompt, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens <= 1024
    with pytest.raises(openai.BadRequestError) as raised:
        await client.completions.create(model=model, prompt=[20] * 1024, max_tokens=1)
    assert raised.value.body["code"] == "context_length_exceeded"


class Animal(pydantic.BaseModel):
    """What the client's own parser asks for."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=6)
    legs: int = pydantic.Field(ge=0, le=9)
    kind: str = pydantic.Field(pattern="^(bird|fish)$")


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "animal", "schema": Animal.model_json_schema(), "strict": True},
}


async def test_answers_parse_as_the_clients_own_model(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.parse(
        model=model,
        messages=MESSAGES,
        response_format=Animal,
        n=3,
        seed=5,
        max_tokens=200,
        logprobs=True,
        top_logprobs=3,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.parsed is not None
        assert choice.logprobs is not None
        assert all(-9999 < entry.logprob <= 0 for entry in choice.logprobs.content or ())
    assert len({choice.message.content for choice in answer.choices}) > 1


async def test_a_streamed_answer_follows_its_schema(client: openai.AsyncOpenAI, model: str) -> None:
    options = {"response_format": FORMAT, "max_tokens": 200, "top_p": 0.9, "frequency_penalty": 0.5}
    whole = await chat(client, model, **options)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in await chat(client, model, stream=True, **options)]
    assert "".join(pieces) == whole.choices[0].message.content
    jsonschema.validate(json.loads("".join(pieces)), Animal.model_json_schema())


async def test_max_tokens_may_cut_a_grammar(client: openai.AsyncOpenAI, model: str) -> None:
    cut = await chat(client, model, response_format=FORMAT, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="strng") as refused:
        await chat(client, model, extra_body={"structured_outputs": {"json": {"type": "strng"}}})
    assert refused.value.param == "structured_outputs"


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.quick
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_even_random_weights_call_the_function_that_they_must(
    client: openai.AsyncOpenAI, model: str, seed: int, stream: bool
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}}
    options = {
        "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": seed, "max_tokens": 600,
    }  # fmt: skip
    if stream:
        async with client.chat.completions.stream(model=model, messages=MESSAGES, **options) as events:
            answer = await events.get_final_completion()
    else:
        answer = await chat(client, model, **options)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, arguments["city"] in ("Rome", "Paris"), 1 <= arguments["days"] <= 9) == (
        "weather",
        True,
        True,
    )
