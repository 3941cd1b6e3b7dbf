# mypy: allow-untyped-calls
"""Models that are pulled while Baton runs, and served without a restart: a stand-in of the hub, separate processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.e2e.asking import complete, expected
from tests.e2e.pulling import NAMES, PROMPT, TOKENS, pull, put, serving, tokens_of
from tests.e2e.stack import PATIENCE_S, ROOT
from tests.hub import hub_served
from tests.models import build_tiny_model
from tests.pooling_models import build_pooling_model
from tests.reference import greedy_tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "org/llama": build_tiny_model(folder / "llama", "llama"),
        "org/qwen": build_tiny_model(folder / "qwen", "qwen3", seed=1),
    }


async def names(client: httpx.AsyncClient) -> set[str]:
    return {model["id"] for model in (await client.get("/v1/models")).json()["data"]}


async def test_what_is_pulled_is_served_at_once_swapped_and_gone_when_it_is_deleted(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with hub_served() as hub:
        for name, folder in folders.items():
            put(hub, name, folder)
        hub.add("other/llama", {file.name: file.read_bytes() for file in folders["org/llama"].iterdir()})
        async with serving(hub, tmp_path, "--keep-alive", "5m", "--max-loaded", "1") as (stack, client):
            assert await names(client) == {"demo"}
            body: dict[str, Any] = {"model": "org/llama", "messages": []}
            async with asyncio.timeout(PATIENCE_S):
                while (unknown := await client.post("/api/chat", json=body)).status_code == 503:
                    await asyncio.sleep(0.05)  # hosts may not have been heard yet
            assert unknown.status_code == 404
            for name in ("hf.co/org/llama:latest", "org/qwen"):
                steps = await pull(client, name)
                assert {"status": "waiting for a host to offer it"} in steps
                assert steps[-1] == {"status": "success"}
            assert await names(client) == {"demo", *NAMES}
            assert stack.children("services.decode") == []
            expected = {name: greedy_tokens(folder, [PROMPT], TOKENS)[0] for name, folder in folders.items()}
            assert expected["org/llama"] != expected["org/qwen"]
            for name in (*NAMES, NAMES[0]):  # one place: each drives the other out
                assert await tokens_of(client, name) == expected[name]
            said = [{"role": "user", "content": "Hello"}]
            body = {"model": "hf.co/org/llama", "messages": said, "stream": False, "options": {"num_predict": 4}}
            chat = await client.post("/api/chat", json=body)
            assert (chat.status_code, chat.json()["model"]) == (200, "hf.co/org/llama"), chat.text
            metrics = (await client.get("/metrics")).text
            assert 'baton_hosted_models{model_name="org/llama",status="ready"} 1.0' in metrics

            busy = await client.request("DELETE", "/api/delete", json={"model": "org/llama"})
            assert busy.status_code == 409
            assert (await client.request("DELETE", "/api/delete", json={"model": "org/qwen"})).status_code == 200
            async with asyncio.timeout(PATIENCE_S):
                while "org/qwen" in await names(client):
                    await asyncio.sleep(0.05)
            assert (await pull(client, "other/llama"))[-1] == {"status": "success"}  # kept, and not served
            assert await names(client) == {"demo", "org/llama"}


UNLOADED = 'baton_hosted_models{model_name="org/vectors",status="unloaded"} 1.0'


async def vectors_of(client: httpx.AsyncClient, model: str, texts: list[str]) -> torch.Tensor:
    answer = await client.post("/v1/embeddings", json={"model": model, "input": texts})
    assert answer.status_code == 200, answer.text
    return torch.tensor([one["embedding"] for one in answer.json()["data"]])


@pytest.mark.long
async def test_a_pulled_model_of_vectors_is_loaded_by_its_first_request_gives_way_and_has_aliases(
    tmp_path: Path,
) -> None:
    folder, texts = build_pooling_model(tmp_path / "vectors"), ["the cat sat", "paris"]
    with hub_served() as hub:
        put(hub, "org/vectors", folder)
        async with serving(hub, tmp_path, "--keep-alive", "5m,5m", "--max-loaded", "1") as (stack, client):
            assert (await pull(client, "org/vectors"))[-2:] == [
                {"status": "waiting for a host to offer it"},
                {"status": "success"},
            ]
            assert (await client.get("/v1/models/hf.co/org/vectors")).json()["capabilities"] == ["embedding"]
            assert stack.children("services.pool") == []
            wanted = await asyncio.to_thread(mean_vectors, folder, texts)
            assert torch.allclose(await vectors_of(client, "hf.co/org/vectors:latest", texts), wanted, atol=1e-5)
            assert len(stack.children("services.pool")) == 1
            assert re.search(r"org/vectors .* served$", await listed_in(tmp_path / "cache"), re.MULTILINE)

            whole = {"name": "emb", "shares": [{"model": "org/vectors", "percent": 100}]}
            assert (await client.post("/admin/aliases", json=whole)).status_code == 200
            assert torch.allclose(await vectors_of(client, "emb", texts), wanted, atol=1e-5)
            listed = {model["id"]: model["root"] for model in (await client.get("/v1/models")).json()["data"]}
            assert listed == {"demo": "demo", "org/vectors": "org/vectors", "emb": "org/vectors"}
            assert torch.allclose(await in_a_batch(client, "emb", texts), wanted, atol=1e-5)
            halves = [{"model": name, "percent": 50} for name in ("org/vectors", "demo")]
            mixed = await client.post("/admin/aliases", json={"name": "half", "shares": halves})
            assert (mixed.status_code, "give it 100 percent" in mixed.text) == (400, True)
            assert (await client.post("/api/copy", json={"source": "emb", "destination": "e2"})).status_code == 200
            assert torch.allclose(await vectors_of(client, "e2", texts), wanted, atol=1e-5)

            assert len(await tokens_of(client, "demo")) == TOKENS  # one place: workers that pool don't sleep, and end
            assert stack.children("services.pool") == []
            assert torch.allclose(await vectors_of(client, "emb", texts), wanted, atol=1e-5)
            assert (await client.post("/sleep?model=org/vectors")).status_code == 200
            async with asyncio.timeout(PATIENCE_S):
                while UNLOADED not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.05)  # a process is gone for its host later than for /proc
            assert (await client.get("/is_sleeping?model=emb")).json() == {"is_sleeping": True}
            assert (await client.request("DELETE", "/api/delete", json={"model": "org/vectors"})).status_code == 200
            async with asyncio.timeout(PATIENCE_S):
                while await names(client) != {"demo"}:
                    await asyncio.sleep(0.05)


async def in_a_batch(client: httpx.AsyncClient, model: str, texts: list[str]) -> torch.Tensor:
    """The vectors of a line of a batch."""
    path = "/v1/embeddings"
    line = {"custom_id": "1", "method": "POST", "url": path, "body": {"model": model, "input": texts}}
    file = await client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", json.dumps(line).encode())}
    )
    assert file.status_code == 200, file.text
    asked = {"input_file_id": file.json()["id"], "endpoint": path, "completion_window": "24h"}
    batch = await client.post("/v1/batches", json=asked)
    assert batch.status_code == 200, batch.text
    async with asyncio.timeout(PATIENCE_S):
        while (made := (await client.get(f"/v1/batches/{batch.json()['id']}")).json())["status"] != "completed":
            assert made["status"] != "failed", made
            await asyncio.sleep(0.05)
    assert made["output_file_id"], made
    answer = json.loads((await client.get(f"/v1/files/{made['output_file_id']}/content")).text)
    return torch.tensor([one["embedding"] for one in answer["response"]["body"]["data"]])


async def listed_in(cache: Path) -> str:
    """The output of `baton list`."""
    listing = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", "list", cwd=ROOT, env=os.environ | {"HF_HUB_CACHE": str(cache)}, stdout=PIPE
    )
    return (await listing.communicate())[0].decode()


def mean_vectors(folder: Path, texts: list[str]) -> torch.Tensor:
    """Normalised means of the last states, as transformers computes them."""
    model, tokenizer = (kind.from_pretrained(folder) for kind in (transformers.AutoModel, transformers.AutoTokenizer))
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    return torch.nn.functional.normalize(torch.stack([state.mean(0) for state in states]))


async def running(client: httpx.AsyncClient, model: str) -> int:
    """Decode workers of a model that hosts have."""
    labels = f'baton_hosted_workers{{count="running",model_name="{model}",role="decode"}} '
    lines = (await client.get("/metrics")).text.splitlines()
    return next((int(float(line.removeprefix(labels))) for line in lines if line.startswith(labels)), 0)


@pytest.mark.long
async def test_a_pulled_model_gets_more_workers_by_load_and_its_place_goes_to_the_next_with_all_of_them(
    tmp_path: Path,
) -> None:
    with hub_served() as hub:
        put(hub, "org/tiny", ROOT / "demo")
        more = ("--device", "fake:20:50", "--kv-memory-mb", "8", "--max-sequences", "4", "--decode", "1-2", "--planner")
        async with serving(hub, tmp_path, *more, "--keep-alive", "5m", "--max-loaded", "1") as (_, client):
            await pull(client, "org/tiny")
            enough = asyncio.Event()

            async def keep_busy(number: int) -> None:
                while not enough.is_set():
                    prompt = [(number * 31 + at * 7) % 200 + 3 for at in range(20)]
                    answer = await complete(client, prompt, model="org/tiny", max_tokens=60)
                    assert answer["tokens"] == expected(ROOT / "demo", prompt, 60)

            async with asyncio.TaskGroup() as group:
                for number in range(8):
                    group.create_task(keep_busy(number))
                async with asyncio.timeout(PATIENCE_S):
                    while await running(client, "org/tiny") < 2:
                        await asyncio.sleep(0.2)
                enough.set()
            await complete(client, [7, 11, 13], model="demo")
            assert (await running(client, "org/tiny"), await running(client, "demo")) == (0, 1)
            await complete(client, [7, 11, 13], model="org/tiny")


@pytest.mark.long
async def test_one_that_does_not_fit_says_what_it_needs_and_the_remedy(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with hub_served() as hub:
        put(hub, "org/llama", folders["org/llama"])
        options = ("--keep-alive", "5m", "--max-loaded", "1", "--kv-memory-mb", str(1 << 24))
        async with serving(hub, tmp_path, *options) as (_, client):
            await pull(client, "org/llama")
            answer = await client.post("/v1/completions", json={"model": "org/llama", "prompt": "a", "max_tokens": 1})
            assert answer.status_code == 503
            assert "needs 16384" in answer.text
            assert "--kv-memory-mb" in answer.text
