"""SmolLM2-135M-Instruct, a published model, through a prefill and a decode worker apart: `make real`."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.e2e.cluster import Cluster
from tests.real.asking import QUESTIONS, ask, body, said

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


async def test_it_knows_what_a_model_of_its_size_knows(client: httpx.AsyncClient) -> None:
    assert "Paris" in said(await ask(client, QUESTIONS[0]))
    assert "Pacific" in said(await ask(client, QUESTIONS[1]))


async def test_many_at_once_answer_as_one_by_one(client: httpx.AsyncClient) -> None:
    asked = [f"{question} {end}" for question in QUESTIONS for end in ("Be brief.", "Explain.")]
    alone = [said(await ask(client, question)) for question in asked]
    together = await asyncio.gather(*(ask(client, question) for question in asked))
    assert [said(answer) for answer in together] == alone
    assert len(set(alone)) > len(asked) / 2


async def test_what_is_cached_answers_as_what_is_computed(client: httpx.AsyncClient) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 60 + "Which animals are in this text?"
    cold, warm = await ask(client, long), await ask(client, long)
    assert said(cold) == said(warm)
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0.9 * warm["usage"]["prompt_tokens"] < cached < warm["usage"]["prompt_tokens"]


async def test_a_schema_is_kept(client: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}}
    answer = json.loads(said(await ask(client, "Name one city.", response_format=form, max_tokens=64)))
    assert set(answer) == {"city", "large"}
    assert isinstance(answer["large"], bool)


async def test_an_answer_outlives_its_decode_worker(cluster: Cluster, client: httpx.AsyncClient) -> None:
    question = "Tell a long story about a lighthouse."
    undisturbed = said(await ask(client, question, max_tokens=96))
    pieces = list[str]()
    asked = client.stream("POST", "/v1/chat/completions", json=body(question, max_tokens=96, stream=True))
    async with asked as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
            if len(pieces) == 8:
                cluster.kill("decode-0")
                await cluster.processes["decode-0"].wait()
                await cluster.start("decode-0")
    assert "".join(pieces) == undisturbed
