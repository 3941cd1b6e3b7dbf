"""A `baton up` that serves what is pulled, and a client of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.stack import PATIENCE_S, ROOT, Up, up
from tests.hub import Hub

TOKENS = 16
PROMPT = [7, 11, 13, 17, 19, 23] * 6
NAMES = ("org/llama", "org/qwen")


@contextlib.asynccontextmanager
async def serving(hub: Hub, folder: Path, *options: str) -> AsyncIterator[tuple[Up, httpx.AsyncClient]]:
    """A `baton up` of the demo that serves what is pulled of `org` as well."""
    own = {"HF_HUB_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "home"), "HF_ENDPOINT": hub.url}
    named = ("--model", f"demo={ROOT / 'demo'}", "--model", "org/*", "--prefill", "0")
    async with (
        up(None, folder / "data", *named, *options, **own) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client,
    ):
        await stack.says("Baton serves demo, org/*")
        key = (folder / "data" / "users" / "admin.key").read_text().strip()
        client.headers["authorization"] = f"Bearer {key}"
        yield stack, client


def put(hub: Hub, name: str, folder: Path) -> None:
    files = (file for file in folder.rglob("*") if file.is_file())
    hub.add(name, {str(file.relative_to(folder)): file.read_bytes() for file in files})


async def pull(client: httpx.AsyncClient, name: str) -> list[dict[str, Any]]:
    answer = await client.post("/api/pull", json={"model": name})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def tokens_of(client: httpx.AsyncClient, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
