"""Prompts that take more blocks than the pool has."""

from __future__ import annotations

import asyncio
import contextlib

import httpx

from tests.e2e.asking import complete

NUM_TOKENS, LENGTH = 6, 250
# The pool has 128 blocks; these prompts take 192, of which 180 are full.
PROMPTS = [[(31 * index + 7 * at + at * at) % 400 + 10 for at in range(LENGTH)] for index in range(12)]
OPTIONS = {"kv_memory_mb": 1, "kv_host_mb": 8, "max_batch_tokens": 64}


async def asked(client: httpx.AsyncClient, prompt: list[int]) -> tuple[object, int]:
    """The answer's tokens, and the prompt's cached ones."""
    answer = await complete(client, prompt, max_tokens=NUM_TOKENS)
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return answer["tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def asked_until_answered(client: httpx.AsyncClient, prompt: list[int]) -> tuple[object, int]:
    """The same, asked again while the cluster has no worker and refuses."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(AssertionError):  # of another status than 200
                return await asked(client, prompt)
            await asyncio.sleep(0.2)
