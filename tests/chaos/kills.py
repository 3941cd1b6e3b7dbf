"""The kill matrix: processes and servers die or stop under load, and no client may notice more than a pause."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.chaos import checks
from tests.chaos.asks import Oracle
from tests.chaos.cluster import ChaosCluster
from tests.chaos.load import Load, Outcome

Fault = Callable[[ChaosCluster], Awaitable[str]]
SILENCE_AFTER_S = 8.0  # a stream's silence counts as the fault's when it began so long after it at most


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What a fault did to the clients and what it left behind. Lists are violations, one line each."""

    fault: str
    requests: int
    whole: int
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    silence_s: float = 0.0

    @property
    def violations(self) -> list[str]:
        """What must be nothing after any fault."""
        return self.wrong + self.unanswered + self.held


async def under_load(
    cluster: ChaosCluster, oracle: Oracle, fault: Fault, *, streams: int, first: int, tail: int = 20
) -> Verdict:
    """Have `streams` requests in flight, let the fault happen, answer `tail` more, end the load, and judge."""
    async with Load(cluster.url, oracle, streams=streams, first=first) as load:
        await load.until_answered(streams // 4)
        began = time.monotonic()
        name = await fault(cluster)
        await load.until_answered(tail)
        outcomes = await load.stop()
    return judge(name, outcomes, oracle, held=await cluster.until_idle(), began=began)


def judge(fault: str, outcomes: list[Outcome], oracle: Oracle, *, held: list[str], began: float) -> Verdict:
    """Apply every check."""
    return Verdict(
        fault=fault,
        requests=len(outcomes),
        whole=sum(outcome.is_whole for outcome in outcomes),
        wrong=checks.wrong(outcomes, oracle.answer),
        unanswered=checks.unanswered(outcomes),
        broken=checks.broken(outcomes),
        held=held,
        errors=checks.errors(outcomes),
        silence_s=checks.longest_silence(outcomes, began, began + SILENCE_AFTER_S),
    )


def crash(role: str) -> Fault:
    """kill -9 of the busiest worker of `role`, or of `gateway`, `nats`, `redis`; it is started again."""

    async def fault(cluster: ChaosCluster) -> str:
        name = await cluster.busiest(role) if role in ("prefill", "decode") else role
        await cluster.crash(name)
        await cluster.again(name)
        return f"kill -9 {role}"

    return fault


def freeze(role: str, seconds: float) -> Fault:
    """SIGSTOP for `seconds`, then SIGCONT."""

    async def fault(cluster: ChaosCluster) -> str:
        name = await cluster.busiest(role) if role in ("prefill", "decode") else role
        await cluster.freeze(name)
        await asyncio.sleep(seconds)
        cluster.thaw(name)
        return f"SIGSTOP {role} {seconds:g} s"

    return fault
