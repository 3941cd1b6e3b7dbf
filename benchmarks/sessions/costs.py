"""Costs of a tier: the first token of a prompt whose KV the pool gave up, and the time a token of streams beside stores."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sessions.agents import Asked, asking
from benchmarks.sessions.trace import Turn

ADDED = 256  # tokens of a prompt that nobody has computed
HITS = 5
STREAMS, STREAM_TOKENS, STREAM_CONTEXT = 8, 512, 512
FED = 2048  # tokens of each prompt that pushes others out
FED_EVERY_S = 0.5  # while the streams run


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians of one arm: a prompt that was in the pool before with `ADDED` tokens more, and streams beside prompts."""

    ttft_s: float
    cached: float
    tpot_s: float


async def measure(url: str, model: str, *, tokens: int, pool_tokens: int, vocab_size: int) -> Costs:
    """Ask `HITS` prompts of so many tokens, push them out of the pool, ask them again, one at a time; then run the streams."""
    random_ = random.Random(7)

    def prompt(count: int) -> list[int]:
        return [random_.randrange(vocab_size) for _ in range(count)]

    async with asking(url, STREAMS + 1) as ask:

        async def asked(tokens: Sequence[int], answer: int) -> Asked:
            result = Asked(0, 0, len(tokens), len(tokens))
            await ask(model, tokens, Turn((), answer, 0.0), result)
            return result

        prompts = [prompt(tokens) for _ in range(HITS)]
        # Twice: a small tier stores what was found once, and the pool keeps that longest.
        for each in prompts + [prompt(FED) for _ in range(2 * pool_tokens // FED)]:
            await asked(each, 1)
            await asked(each, 1)
        again = [await asked(each + prompt(ADDED), 1) for each in prompts]

        async def feed() -> None:
            while True:
                await asyncio.gather(asked(prompt(FED), 1), asyncio.sleep(FED_EVERY_S))

        feeding = asyncio.create_task(feed())
        streams = await asyncio.gather(*(asked(prompt(STREAM_CONTEXT), STREAM_TOKENS) for _ in range(STREAMS)))
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    return Costs(
        statistics.median(each.ttft_s for each in again),
        statistics.median(each.cached for each in again),
        statistics.median(each.tpot_s for each in streams),
    )
