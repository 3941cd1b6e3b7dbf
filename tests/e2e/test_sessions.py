"""A session that was saved is restored after its worker and its gateway are gone, and its next turn finds its KV."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.e2e.asking import client_of
from tests.e2e.cluster import Cluster
from tests.models import build_tiny_model

PROMPT = [(7 * at + at * at) % 400 + 10 for at in range(200)]


async def turn(client: httpx.AsyncClient, prompt: list[int]) -> tuple[list[int], int]:
    """The answer's tokens, and the prompt's cached ones."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = await client.post(
        "/v1/completions", json=body | {"return_token_ids": True}, headers={"x-session-id": "agent"}
    )
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["token_ids"], (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def test_a_session_outlives_its_processes(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    async with Cluster(tmp_path / "run", model=model, prefill=0, decode=0, both=1) as cluster:
        async with client_of(cluster) as client:
            tokens, _ = await turn(client, PROMPT)
            expected, _ = await turn(client, PROMPT + tokens)
            saved = await client.post("/v1/sessions", json={"name": "book", "session": "agent"})
            assert saved.status_code == 200, saved.text
            assert saved.json()["num_tokens"] == len(PROMPT + tokens + expected)
        for name in ("worker-0", "gateway"):
            cluster.kill(name)
            await cluster.processes[name].wait()
            await cluster.start(name)
        await cluster.until_ready()
        async with client_of(cluster) as client:
            restored = await client.post("/v1/sessions/book/restore", json={"session": "agent"})
            assert restored.status_code == 200, restored.text
            assert restored.json()["cached_tokens"] == 0  # the worker's memory went with it
            again, cached = await turn(client, PROMPT + tokens)
            assert (again, cached) == (expected, (len(PROMPT + tokens) - 1) // 16 * 16)
