"""What a running Baton answers beside what llama.cpp computes from the same file in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.quality.perplexity import perplexity
from tests.real.llama_cpp import LlamaCpp

AT_ONCE = 16


class Beside(NamedTuple):
    """Greedy answers of both: how many tokens differ of how many, and by how much at most the logprobs of equal ones."""

    tokens: int
    others: int
    farthest: float


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def split_otherwise(client: httpx.AsyncClient, referee: LlamaCpp, texts: Sequence[str]) -> list[str]:
    """The texts that become other tokens, with control tokens parsed or spelled out."""

    async def differs(text: str, *, special: bool) -> bool:
        answer = await ask(
            client, "/tokenize", model="tiny", prompt=text, add_special_tokens=False, parse_special=special
        )
        return bool(answer["tokens"] != referee.tokenize(text, special=special))

    return [text for text in texts for special in (True, False) if await differs(text, special=special)]


async def answered_beside(
    client: httpx.AsyncClient, referee: LlamaCpp, prompts: Sequence[Sequence[int]], count: int
) -> Beside:
    """Greedy answers of `count` tokens.

    llama.cpp reads each in one go: as long as all tokens before are equal, the likeliest next one is its own answer.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def answer(prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        options = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        async with places:
            (choice,) = (await ask(client, "/v1/completions", model="tiny", prompt=list(prompt), **options))["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    others, farthest = 0, 0.0
    for prompt, (ids, logprobs) in zip(prompts, await asyncio.gather(*map(answer, prompts)), strict=True):
        assert len(ids) == count
        theirs = referee.logprobs([*prompt, *ids[:-1]])[len(prompt) - 1 :]
        others += int((theirs.argmax(axis=1) != ids).sum())
        farthest = max(farthest, float(np.abs(theirs[range(count), ids] - logprobs).max()))
    return Beside(count * len(prompts), others, farthest)


async def perplexities(
    client: httpx.AsyncClient, referee: LlamaCpp, windows: Sequence[Sequence[int]]
) -> tuple[float, float, float]:
    """Ours and llama.cpp's of all windows together, and by how much one token's logprob differs at most."""
    ours, theirs = list[Any](), list[Any]()
    for ids in windows:
        answer = await ask(client, "/v1/completions", model="tiny", prompt=list(ids), max_tokens=1, prompt_logprobs=0)
        entries = answer["choices"][0]["prompt_logprobs"]
        ours.append(np.array([entry[str(token)]["logprob"] for entry, token in zip(entries[1:], ids[1:], strict=True)]))
        theirs.append(referee.logprobs(ids)[range(len(ids) - 1), ids[1:]])
    farthest = max(float(np.abs(one - other).max()) for one, other in zip(ours, theirs, strict=True))
    return perplexity(*ours), perplexity(*theirs), farthest
