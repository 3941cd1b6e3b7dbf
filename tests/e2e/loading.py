"""A `baton up` that loads models on demand, a client of it, and the memory that it takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.stack import PATIENCE_S, Up, up

TOKENS = 16
PROMPT = [7, 11, 13, 17, 19, 23] * 6
LEFT_BYTES = 64 << 20  # caches of gateway and servers, not a model


@contextlib.asynccontextmanager
async def serving(folders: dict[str, Path], data: Path, *options: str) -> AsyncIterator[tuple[Up, httpx.AsyncClient]]:
    named = [part for name, folder in folders.items() for part in ("--model", f"{name}={folder}")]
    async with (
        up(None, data, *named, *options) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client,
    ):
        await stack.says(f"Baton serves {', '.join(folders)}")
        yield stack, client


async def ask(client: httpx.AsyncClient, model: str) -> list[int]:
    body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    answer = await client.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


async def eventually(found: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not found():
            await asyncio.sleep(0.05)


def memory_of(stack: Up) -> int:
    """Private bytes of all its processes."""
    total = 0
    for process in stack.family():
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().uss
    return total
