"""Mixed traffic with cancels for a while: what processes and servers keep must not grow with the number of requests.

Load comes in parts. After each one the clients hang up, and what the idle cluster still holds is looked at. What has a bound
fills first, or an hour would measure how it does: the workers' pools and the prefix index, the gateway's recent prefixes and its
connections to Redis.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from gateway.placement.placer import MAX_BLOCKS
from tests.chaos.asks import SPECIAL, VOCABULARY, Oracle
from tests.chaos.cluster import ChaosCluster
from tests.chaos.holdings import Holdings, growth, holdings
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import BACK_OFF_S, Load, Outcome

PARTS, LONGEST_PART_S = 20, 120.0
STREAMS = 40
BLOCK_SIZE = 16
FILL_TOKENS = 1000  # of a prompt


@dataclass(slots=True, kw_only=True)
class Soaked:
    """What clients saw, and what was held at which second."""

    verdict: Verdict
    samples: list[tuple[float, Holdings]] = field(default_factory=list)

    def growth(self, name: str, seconds: float) -> float:
        """By how much `name` grows in `seconds`."""
        return growth(self.samples, name, seconds)

    @property
    def names(self) -> list[str]:
        """Of all that was looked at."""
        return list(dict.fromkeys(name for _, held in self.samples for name in held))


async def soak(
    cluster: ChaosCluster,
    oracle: Oracle,
    *,
    rate: float,
    seconds: float,
    first: int,
    is_fake: bool = True,
    tell: Callable[[float, Holdings], None] = lambda second, held: None,
) -> Soaked:
    """`rate` requests a second. The oracle knows the answers of the fake device; of a real model they are not compared."""
    result = Soaked(verdict=Verdict(fault="soak", requests=0, whole=0))
    began, part_s = time.monotonic(), min(seconds / PARTS, LONGEST_PART_S)
    while (now := time.monotonic() - began) < seconds:
        part = await _load(cluster, oracle, rate=rate, seconds=min(part_s, seconds - now), first=first)
        first += len(part)
        await _add(result.verdict, part, oracle, held=await cluster.until_idle(), is_fake=is_fake)
        result.samples.append((time.monotonic() - began, await holdings(cluster)))
        tell(*result.samples[-1])
    return result


async def fill(cluster: ChaosCluster, blocks: int = MAX_BLOCKS) -> None:
    """Send prompts of which none has anything in common, `blocks` in all; by default the gateway then forgets the first one."""
    chance, left = random.Random(7), iter(range(blocks * BLOCK_SIZE // FILL_TOKENS + STREAMS))

    async def client() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60, verify=False) as client:
            for _ in left:
                prompt = [chance.randint(SPECIAL, VOCABULARY) for _ in range(FILL_TOKENS)]
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
                while (answer := await client.post("/v1/completions", json=body)).status_code in (429, 503):
                    await asyncio.sleep(BACK_OFF_S)
                answer.raise_for_status()

    await asyncio.gather(*(client() for _ in range(STREAMS)))


async def _load(cluster: ChaosCluster, oracle: Oracle, *, rate: float, seconds: float, first: int) -> list[Outcome]:
    async with Load(cluster.url, oracle, streams=STREAMS, first=first, rate=rate) as load:
        await asyncio.sleep(seconds)
        return await load.stop()


async def _add(verdict: Verdict, part: list[Outcome], oracle: Oracle, *, held: list[str], is_fake: bool) -> None:
    """Judge a part now: an hour's outcomes would be the largest thing here."""
    one = await asyncio.to_thread(judge, "soak", part, oracle, held=held, began=0.0)
    verdict.requests += one.requests
    verdict.whole += one.whole
    verdict.wrong += one.wrong if is_fake else []
    verdict.unanswered += one.unanswered
    verdict.broken += one.broken
    verdict.held += one.held
    verdict.errors += one.errors
    verdict.silence_s = max(verdict.silence_s, one.silence_s)
