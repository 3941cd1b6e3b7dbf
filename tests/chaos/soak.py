"""Mixed traffic with cancels for a while: what processes and servers keep must not grow with the number of requests.

Load comes in parts. After each one the clients hang up, and what the idle cluster still holds is looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.asks import Oracle
from tests.chaos.cluster import ChaosCluster
from tests.chaos.holdings import Holdings, growth, holdings
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import Load, Outcome

PARTS, LONGEST_PART_S = 20, 120.0
STREAMS = 40


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
