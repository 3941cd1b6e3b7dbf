"""The same question in every dialect, through real processes: the same text, also when a worker dies in mid-stream.

The workers run the fake device: a text is right only if every byte of every block was.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.answers.tokenizer import ChatTokenizer
from tests.e2e.asking import FAKE, all_idle, expected, until, watching
from tests.e2e.cluster import Cluster

QUESTION = "Tell me story 34."  # the fake device ends no answer to it
TOKENS = 300
KEYS = {"wide": "a-key-of-a-wide-tenant", "narrow": "a-key-of-a-narrow-tenant"}
TENANTS = f"""
[tenants.wide]
keys = ["{KEYS["wide"]}"]
[tenants.narrow]
keys = ["{KEYS["narrow"]}"]
requests_per_minute = 1
"""
BEARER = "authorization"
Json = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How a dialect is asked, and where its answers have their text."""

    path: str
    body: Json
    event: Callable[[Json], str]  # the text of one event
    whole: Callable[[Any], str]
    count: tuple[str, ...]  # where the body has the number of tokens
    whole_path: str = ""  # "": the same
    header: str = BEARER
    refused: Callable[[Json], Any] = field(default=lambda body: body["error"]["code"])
    limited: Any = "rate_limit_exceeded"

    def asked(self, *, stream: bool, tokens: int) -> Json:
        body: Json = json.loads(json.dumps(self.body)) | ({} if self.whole_path else {"stream": stream})
        place = body
        for name in self.count[:-1]:
            place = place[name]
        place[self.count[-1]] = tokens
        return body

    def headers(self, tenant: str) -> dict[str, str]:
        return {self.header: f"Bearer {KEYS[tenant]}" if self.header == BEARER else KEYS[tenant]}


def _choice(body: Json) -> str:
    choice = body["choices"][0] if body["choices"] else {}
    said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    return said.get("content") or ""


def _response(event: Json) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _block(event: Json) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"model": "tiny", "temperature": 0}
CHATS = {
    "openai": Way("/v1/chat/completions", GREEDY | {"messages": MESSAGES}, _choice, _choice, ("max_tokens",)),
    "azure": Way(
        "/openai/deployments/tiny/chat/completions",
        {"messages": MESSAGES, "temperature": 0}, _choice, _choice, ("max_tokens",),
        header="api-key",
    ),
    "sagemaker": Way("/invocations", GREEDY | {"messages": MESSAGES}, _choice, _choice, ("max_tokens",)),
    "responses": Way(
        "/v1/responses",
        GREEDY | {"input": QUESTION},
        _response,
        lambda body: "".join(part["text"] for item in body["output"] for part in item["content"]),
        ("max_output_tokens",),
    ),
    "anthropic": Way(
        "/v1/messages",
        GREEDY | {"messages": MESSAGES},
        _block,
        lambda body: "".join(block["text"] for block in body["content"]),
        ("max_tokens",),
        header="x-api-key",
        refused=lambda body: (body["type"], body["error"]["type"]),
        limited=("error", "rate_limit_error"),
    ),
    "ollama": Way(
        "/api/chat",
        {"model": "tiny", "messages": MESSAGES, "options": {"temperature": 0}},
        lambda event: str(event["message"]["content"]),
        lambda body: str(body["message"]["content"]),
        ("options", "num_predict"),
        refused=lambda body: sorted(body),
        limited=["error"],
    ),
}  # fmt: skip
TEXTS = {
    "openai's completions": Way("/v1/completions", GREEDY | {"prompt": QUESTION}, _choice, _choice, ("max_tokens",)),
    "ollama's generate": Way(
        "/api/generate",
        {"model": "tiny", "prompt": QUESTION, "raw": True, "options": {"temperature": 0}},
        lambda event: str(event["response"]),
        lambda body: str(body["response"]),
        ("options", "num_predict"),
        refused=lambda body: sorted(body),
        limited=["error"],
    ),
    "llama.cpp": Way(
        "/completion",
        GREEDY | {"prompt": QUESTION},
        lambda event: str(event["content"]),
        lambda body: str(body["content"]),
        ("n_predict",),
        refused=lambda body: body["error"]["type"],
        limited="unavailable_error",
    ),
    "tgi": Way(
        "/generate_stream",
        {"inputs": QUESTION, "parameters": {"do_sample": False}},
        lambda event: "" if event["token"]["special"] else str(event["token"]["text"]),
        lambda body: str(body["generated_text"]),
        ("parameters", "max_new_tokens"),
        whole_path="/generate",
        refused=lambda body: body["error_type"],
        limited="overloaded",
    ),
    "triton": Way(
        "/v2/models/tiny/generate_stream",
        {"text_input": QUESTION, "parameters": {"temperature": 0}},
        lambda event: str(event["text_output"]),
        lambda body: str(body["text_output"]).removeprefix(QUESTION),
        ("parameters", "max_tokens"),
        whole_path="/v2/models/tiny/generate",
        refused=lambda body: sorted(body),
        limited=["error"],
    ),
}
WAYS = CHATS | TEXTS


@pytest.fixture(scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Each test leaves the workers with nothing to do; the last one kills one of them."""
    folder = tmp_path_factory.mktemp("dialects")
    tenants = folder / "tenants.toml"
    tenants.write_text(TENANTS)
    options = {**FAKE, "fake_step_ms": 10}
    async with Cluster(
        folder / "run", model=model, decode=2, gateway_options=("--tenants", str(tenants)), **options
    ) as started:  # type: ignore[arg-type]
        yield started


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, verify=False) as client:
        yield client


def answers_of(model: Path) -> dict[str, str]:
    """What is right, by way."""
    tokenizer = ChatTokenizer(model)
    prompt = tokenizer.render([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    chat, text = (
        tokenizer.decode(expected(model, ids, TOKENS), skip_special_tokens=True)
        for ids in (tokenizer.encode(prompt, add_special_tokens=False), tokenizer.encode(QUESTION))
    )
    return dict.fromkeys(CHATS, chat) | dict.fromkeys(TEXTS, text)


async def events_of(client: httpx.AsyncClient, way: Way, tokens: int = TOKENS) -> AsyncIterator[Json]:
    """A stream's events as they come."""
    body = way.asked(stream=True, tokens=tokens)
    async with client.stream("POST", way.path, json=body, headers=way.headers("wide")) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                yield json.loads(data)


async def streamed(client: httpx.AsyncClient, way: Way) -> str:
    return "".join([way.event(event) async for event in events_of(client, way)])


async def test_the_same_question_has_the_same_text_in_every_dialect(
    client: httpx.AsyncClient, cluster: Cluster, model: Path
) -> None:
    async def whole(way: Way) -> str:
        body = way.asked(stream=False, tokens=TOKENS)
        answer = await client.post(way.whole_path or way.path, json=body, headers=way.headers("wide"))
        assert answer.status_code == 200, answer.text
        return way.whole(answer.json())

    right = answers_of(model)
    streams, wholes = await asyncio.gather(
        asyncio.gather(*(streamed(client, way) for way in WAYS.values())),
        asyncio.gather(*(whole(way) for way in WAYS.values())),
    )
    assert dict(zip(WAYS, streams, strict=True)) == right
    assert dict(zip(WAYS, wholes, strict=True)) == right


async def test_who_hangs_up_frees_the_workers_in_every_dialect(client: httpx.AsyncClient, cluster: Cluster) -> None:
    async def leave(way: Way) -> None:
        async for event in events_of(client, way, tokens=350):
            if way.event(event):
                return

    async with watching(cluster) as (_, peers):
        await asyncio.gather(*(leave(way) for way in WAYS.values()))
        await until(peers, lambda states: len(states) == 3 and all_idle(states))


@pytest.mark.parametrize("name", WAYS)
async def test_a_key_is_asked_for_in_the_dialect_s_form(client: httpx.AsyncClient, name: str) -> None:
    way = WAYS[name]
    answer = await client.post(way.path, json=way.asked(stream=True, tokens=1))
    assert answer.status_code == 401
    assert type(way.refused(answer.json())) is type(way.limited)


async def test_a_spent_budget_is_told_in_the_dialect_s_form(client: httpx.AsyncClient) -> None:
    first = WAYS["openai"]
    spent = await client.post(first.path, json=first.asked(stream=False, tokens=1), headers=first.headers("narrow"))
    assert spent.status_code == 200
    for name, way in WAYS.items():
        answer = await client.post(way.path, json=way.asked(stream=True, tokens=1), headers=way.headers("narrow"))
        assert (answer.status_code, way.refused(answer.json())) == (429, way.limited), name
        assert int(answer.headers["retry-after"]) > 0


@pytest.mark.long
async def test_a_decode_worker_killed_in_mid_stream_changes_no_dialect_s_text(
    client: httpx.AsyncClient, cluster: Cluster, model: Path
) -> None:
    """The last test here: the cluster has one decode worker less then."""
    right, texts = answers_of(model), dict.fromkeys(WAYS, "")
    begun = {name: asyncio.Event() for name in WAYS}
    unfinished: list[str] = []

    async def read(name: str) -> None:
        async for event in events_of(client, WAYS[name]):
            texts[name] += WAYS[name].event(event)
            begun[name].set()

    async def kill() -> None:
        async with watching(cluster) as (_, peers), asyncio.timeout(60):
            await asyncio.gather(*(each.wait() for each in begun.values()))
            await until(peers, lambda states: any(state.running for state in states if "decode" in state.roles))
            busiest = max(peers.states.values(), key=lambda state: state.running if "decode" in state.roles else -1)
            cluster.kill(busiest.worker)
            unfinished.extend(name for name in WAYS if texts[name] != right[name])

    await asyncio.gather(*(read(name) for name in WAYS), kill())
    assert unfinished
    assert texts == right
