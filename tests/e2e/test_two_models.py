"""Two models on one bus, a folder and a GGUF file, each found by its name: real workers with real weights, one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.runtime.linux import die_with_parent
from services.runtime.servers import stop
from tests.e2e.asking import until, watching
from tests.e2e.cluster import ROOT, Cluster
from tests.gguf_files import write_gguf
from tests.integration.waiting import eventually
from tests.models import build_tiny_model
from tests.ports import own_port
from tests.reference import greedy_tokens

TOKENS = 12
LONGEST = {"llama": 1024, "qwen": 512}
PROMPT = [7, 11, 13, 17, 19, 23] * 12  # some whole blocks
WORKERS = {"prefill-1": "qwen", "decode-1": "qwen"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Other weights, another family, another context, and a tokenizer with two letters exchanged."""
    folder = tmp_path_factory.mktemp("models")
    llama = build_tiny_model(folder / "llama", "llama", max_position_embeddings=LONGEST["llama"])
    qwen = build_tiny_model(folder / "qwen", "qwen3", seed=1, max_position_embeddings=LONGEST["qwen"])
    file = qwen / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["x"], vocabulary["z"] = vocabulary["z"], vocabulary["x"]
    file.write_text(json.dumps(tokenizer))
    return {"llama": llama, "qwen": write_gguf(qwen, folder / "qwen.gguf")}


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> AsyncIterator[Cluster]:
    """A prefill and a decode worker for each model."""
    models = ",".join(f"{name}={folder}" for name, folder in folders.items())
    others = {worker: (name, folders[name]) for worker, name in WORKERS.items()}
    others |= dict.fromkeys(("prefill-0", "decode-0"), ("llama", folders["llama"]))
    folder = tmp_path_factory.mktemp("cluster")
    options = ("--served-models", models)
    async with Cluster(
        folder, model=folders["llama"], prefill=2, decode=2, gateway_options=options, others=others
    ) as it:
        yield it


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


async def complete(client: httpx.AsyncClient, model: str, prompt: list[int] | str, **options: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body | {"return_token_ids": True} | options)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["model"] == model
    return answer


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_both_models_are_listed_with_their_own_context(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    assert {card["id"]: card["max_model_len"] for card in listed} == LONGEST
    card = (await client.get("/v1/models/qwen")).json()
    assert (card["id"], card["max_model_len"]) == ("qwen", LONGEST["qwen"])


async def test_tokens_are_the_models_own(client: httpx.AsyncClient, folders: dict[str, Path]) -> None:
    for model, folder in folders.items():
        answer = await complete(client, model, PROMPT)
        assert answer["choices"][0]["token_ids"] == greedy_tokens(folder.with_suffix(""), [PROMPT], TOKENS)[0], model


async def test_prefix_caches_never_cross(client: httpx.AsyncClient) -> None:
    """The same tokens are other blocks in another model, also in a worker's cache and in Redis's index."""
    prompt = [29, 31, 37] * 24
    assert cached(await complete(client, "llama", prompt)) == 0
    assert cached(await complete(client, "qwen", prompt)) == 0
    assert cached(await complete(client, "llama", prompt)) >= 64
    assert cached(await complete(client, "qwen", prompt)) >= 64


async def test_text_becomes_tokens_by_the_models_own_tokenizer(client: httpx.AsyncClient) -> None:
    tokens = {}
    for model in LONGEST:
        asked = await client.post("/tokenize", json={"model": model, "prompt": "x"})
        tokens[model] = asked.json()["tokens"]
        assert asked.json()["max_model_len"] == LONGEST[model]
        text = (await client.post("/detokenize", json={"model": model, "tokens": tokens[model]})).json()["prompt"]
        assert text == "x"
        answer = await complete(client, model, "x", echo=True)
        assert answer["choices"][0]["text"].startswith("x")
    assert tokens["llama"] != tokens["qwen"]


async def test_a_prompt_may_be_as_long_as_its_own_model_reads(client: httpx.AsyncClient) -> None:
    prompt = [5] * 600
    assert (await complete(client, "llama", prompt))["usage"]["prompt_tokens"] == 600
    body = {"model": "qwen", "prompt": prompt, "max_tokens": 1}
    refused = await client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "512 tokens" in refused.json()["error"]["message"]


async def test_an_unknown_name_is_answered_with_the_known_ones(client: httpx.AsyncClient) -> None:
    refused = await client.post("/v1/completions", json={"model": "gpt", "prompt": "x"})
    assert refused.status_code == 404
    message = refused.json()["error"]["message"]
    assert "gpt" in message
    assert "llama" in message
    assert "qwen" in message


async def test_metrics_carry_each_models_name(client: httpx.AsyncClient) -> None:
    before = (await client.get("/metrics")).text
    await complete(client, "qwen", [3, 5, 8])

    def value(text: str, name: str, *labels: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(name) and all(label in line for label in labels)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def counted() -> str:
        text = (await client.get("/metrics")).text
        ended = [value(one, "baton_requests_total{", 'model_name="qwen"') for one in (before, text)]
        return text if ended[1] > ended[0] else ""

    after = await eventually(counted)
    for model, grown in (("llama", 0), ("qwen", 3)):
        label = f'model_name="{model}"'
        name = "vllm:prompt_tokens_total{"
        assert value(after, name, label) - value(before, name, label) == grown, model
        placed = "baton_placements_total{"
        assert value(after, placed, label) - value(before, placed, label) == (grown > 0), model
        ended = "baton_requests_total{"
        assert value(after, ended, label) - value(before, ended, label) == (grown > 0), model
        tenant = "baton_tenant_tokens_total{"
        assert (value(after, tenant, label) > value(before, tenant, label)) == (grown > 0), model


async def contexts(client: httpx.AsyncClient) -> dict[str, int | None]:
    """The longest context of each model that is listed."""
    return {card["id"]: card["max_model_len"] for card in (await client.get("/v1/models")).json()["data"]}


async def test_a_model_whose_workers_are_gone_is_refused_by_name(cluster: Cluster, client: httpx.AsyncClient) -> None:
    async with watching(cluster) as (_, peers):
        await until(peers, lambda states: len(states) == 4)
        cluster.kill("decode-1")
        await until(peers, lambda states: all(state.worker != "decode-1" for state in states))
        async with asyncio.timeout(60):
            while (await contexts(client))["qwen"] is not None:  # the gateway misses it by its own clock
                await asyncio.sleep(0.05)
        for stream in (False, True):
            body = {"model": "qwen", "prompt": PROMPT, "max_tokens": 1, "stream": stream}
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert "no decode worker of model 'qwen' is ready" in refused.json()["error"]["message"]
        await complete(client, "llama", PROMPT)
        assert (await client.get("/ready")).status_code == 200
        assert await contexts(client) == {"llama": LONGEST["llama"], "qwen": None}


async def test_a_gateway_with_another_tokenizer_is_not_ready_and_says_why(
    cluster: Cluster, folders: dict[str, Path]
) -> None:
    """Under the name `llama` it has the tokenizer of `qwen`."""
    url, log = f"http://127.0.0.1:{own_port()}", cluster.folder / "wrong.log"
    flags = [*cluster.reach("nats", "admin", "gateway"), *cluster.reach("redis", "admin", "gateway")]
    flags += ["--gateway-id", "wrong", "--served-models", f"llama={folders['qwen']}", "--port", url.rpartition(":")[2]]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", *flags, cwd=ROOT, stderr=log.open("wb"), preexec_fn=die_with_parent
    )
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            # While only the other model's workers are heard, they may be meant.
            said = await until_it_refuses(client, {"prefill-0", "decode-0"})
            body = {"model": "llama", "prompt": "Hello", "max_tokens": 3}
            answer = await client.post("/v1/completions", json=body)
            metrics = (await client.get("/metrics")).text
        async with asyncio.timeout(60):
            while "worker.refused" not in log.read_text():
                await asyncio.sleep(0.05)
    finally:
        await stop(process, timeout_s=10)
    assert said["status"] == "not ready"
    assert "is not this gateway's for 'llama'" in said["refused"]["decode-0"]
    assert "start both with the same model folder" in said["refused"]["decode-0"]
    assert answer.status_code == 503
    assert "no decode worker agrees with this gateway (tokenizer)" in answer.json()["error"]["message"]
    assert 'baton_worker_refused{model_name="llama",what="tokenizer",worker="decode-0"} 1.0' in metrics


async def until_it_refuses(client: httpx.AsyncClient, workers: set[str]) -> dict[str, Any]:
    """What `/ready` answers once it is not ready for these workers."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(httpx.TransportError):
                said: dict[str, Any] = (await client.get("/ready")).json()
                if said["status"] != "ready" and workers <= said.get("refused", {}).keys():
                    return said
            await asyncio.sleep(0.05)
