"""Agents that play their sessions at a gateway, each a turn behind the other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from benchmarks.sessions.trace import Turn

TIMEOUT_S = 600.0


@dataclass(slots=True)
class Asked:
    """A turn as its agent saw it. `reusable`: tokens of its prompt that the session had before."""

    session: int
    turn: int
    prompt_tokens: int
    reusable: int
    ttft_s: float = 0.0
    last_s: float = 0.0
    cached: int = 0
    answer: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.ttft_s) / max(1, len(self.answer) - 1)


Ask = Callable[[str, Sequence[int], Turn, Asked], Awaitable[None]]


async def play(url: str, model: str, sessions: Sequence[Sequence[Turn]]) -> list[Asked]:
    """All sessions at once, each after the pause of its last turn; a session ends with its first error."""
    async with asking(url, len(sessions)) as ask:
        played = await asyncio.gather(*(_play(ask, model, number, each) for number, each in enumerate(sessions)))
    return [asked for each in played for asked in each]


@asynccontextmanager
async def asking(url: str, connections: int) -> AsyncIterator[Ask]:
    """A function that asks one turn of a prompt and fills its `Asked`. Raises httpx.HTTPError and ValueError."""
    limits = httpx.Limits(max_connections=connections)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def ask(model: str, prompt: Sequence[int], turn: Turn, asked: Asked) -> None:
            await _ask(client, _body(model, prompt, turn), asked)

        yield ask


async def _play(ask: Ask, model: str, number: int, session: Sequence[Turn]) -> list[Asked]:
    prompt, played = list[int](), list[Asked]()
    pauses = [session[-1].pause_s, *(turn.pause_s for turn in session)]
    for at, turn in enumerate(session):
        await asyncio.sleep(pauses[at])
        asked = Asked(number, at, len(prompt) + len(turn.new_tokens), len(prompt))
        prompt += turn.new_tokens
        played.append(asked)
        try:
            await ask(model, prompt, turn, asked)
        except (httpx.HTTPError, ValueError) as error:
            asked.error = f"{type(error).__name__}: {error}"
            break
        prompt += asked.answer
    return played


async def _ask(client: httpx.AsyncClient, body: dict[str, object], asked: Asked) -> None:
    """Raises ValueError unless the answer is a complete stream."""
    began_at = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(json.loads(line.removeprefix("data: ")), asked, time.monotonic() - began_at)
    if len(asked.answer) != body["max_tokens"]:
        raise ValueError(f"{len(asked.answer)} of {body['max_tokens']} tokens came")


def _take(event: dict[str, object], asked: Asked, since_s: float) -> None:
    if isinstance(usage := event.get("usage"), dict):
        asked.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    for choice in event.get("choices") or ():  # type: ignore[attr-defined]
        asked.ttft_s, asked.last_s = asked.ttft_s or since_s, since_s
        asked.answer += choice.get("token_ids") or ()


def _body(model: str, prompt: Sequence[int], turn: Turn) -> dict[str, object]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": turn.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
