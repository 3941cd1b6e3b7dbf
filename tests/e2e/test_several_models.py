"""Several models of one `baton up`: each has workers of its own, and is answered by no other, also while workers are killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.stack import PATIENCE_S, up
from tests.models import build_tiny_model
from tests.reference import greedy_tokens

TOKENS = 24
ROUNDS = 6
PROMPTS = [[7, 11, 13, 17, 19, 23] * 6, [29, 31, 37, 41] * 9]
KILL_AFTER = 2  # rounds


async def test_answers_are_the_models_own_while_workers_are_killed(tmp_path: Path) -> None:
    folders = {
        "llama": build_tiny_model(tmp_path / "one", "llama"),
        "qwen": build_tiny_model(tmp_path / "two", "qwen3", seed=1),
    }
    expected = {name: greedy_tokens(folder, PROMPTS, TOKENS) for name, folder in folders.items()}
    assert expected["llama"] != expected["qwen"]
    named = [part for name, folder in folders.items() for part in ("--model", f"{name}={folder}")]
    async with (
        up(None, tmp_path / "data", *named) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client,
    ):
        assert "0 prefill and 1 decode for each" in await stack.says("Baton serves llama, qwen")
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["llama", "qwen"]

        async def ask(model: str, turn: int) -> None:
            body = {"model": model, "prompt": PROMPTS[turn % 2], "max_tokens": TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = await _answered(client, body)
            assert answer["model"] == model
            assert answer["choices"][0]["token_ids"] == expected[model][turn % 2], (model, turn)

        async def keep_asking(model: str) -> None:
            for turn in range(ROUNDS):
                await ask(model, turn)
                rounds[model] += 1

        rounds = dict.fromkeys(folders, 0)
        asking = [asyncio.create_task(keep_asking(model)) for model in folders]
        while min(rounds.values()) < KILL_AFTER and not any(task.done() for task in asking):
            await asyncio.sleep(0.01)
        for worker in stack.children("services.decode"):
            worker.kill()
        for _ in folders:
            await stack.says("restarting decode-")
        await asyncio.gather(*asking)
        refused = await client.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "'llama', 'qwen'" in refused.json()["error"]["message"]


async def _answered(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, asked for again while no worker is there: a model has one here, which is started again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            response = await client.post("/v1/completions", json=body)
            if response.status_code != 503:
                assert response.status_code == 200, response.text
                answer: dict[str, Any] = response.json()
                return answer
            await asyncio.sleep(0.1)
