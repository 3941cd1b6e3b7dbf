"""More than can be served, and clients that don't read: refusals are quick and say when to come back, memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.chaos import checks
from tests.chaos.asks import Ask, Oracle, Seen
from tests.chaos.cluster import ChaosCluster
from tests.chaos.flood import ANSWER_TOKENS, DEADLINE_S, PROMPT_TOKENS, body_of
from tests.chaos.load import Outcome
from tests.e2e.cluster import ROOT

STEP_MS, TOKEN_US = 2, 2000  # of the fake device
SLOW = {"fake_step_ms": STEP_MS, "fake_token_us": TOKEN_US}
CAPACITY = 1e6 / (PROMPT_TOKENS * TOKEN_US)  # prompts a second: 5
PERCENTILE = 0.99
__all__ = ["ANSWER_TOKENS", "CAPACITY", "SLOW", "Overload", "deaf_clients", "hung_up", "offer"]


@dataclass(slots=True, kw_only=True)
class Overload:
    """What `offered` requests a second for `seconds` led to; latencies in seconds."""

    offered: float
    seconds: float
    began: float
    outcomes: list[Outcome]
    memory_mb: dict[str, float]  # of each process at its peak
    metrics: dict[str, float]  # of the gateway: what they grew by
    wrong: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Whole answers a second, while it lasted."""
        until = self.began + self.seconds
        return sum(outcome.is_whole and outcome.ended <= until for outcome in self.outcomes) / self.seconds

    @property
    def refused(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status in (429, 503)]

    @property
    def refusal_p99_s(self) -> float:
        """Of requests that were refused at all; 0 when none was."""
        times = sorted(outcome.ended - outcome.started for outcome in self.refused)
        return statistics.quantiles(times, n=100)[98] if len(times) > 1 else sum(times)

    @property
    def gateway_p99_s(self) -> float:
        """The same from the last byte read to the last byte written; a bound, because the gateway counts in buckets."""
        return quantile(self.metrics, "baton_refusal_seconds", PERCENTILE)

    @property
    def refused_late(self) -> int:
        """Those that were let in and refused after waiting."""
        return int(self.metrics.get('baton_refusal_seconds_count{when="after waiting"}', 0))

    @property
    def without_retry_after(self) -> int:
        return sum(not outcome.retry_after for outcome in self.refused)


async def offer(cluster: ChaosCluster, oracle: Oracle, *, rate: float, seconds: float, first: int) -> Overload:
    """Send `rate` requests a second, whatever comes back, from a process of its own (`tests.chaos.flood`)."""
    before, began, peaks = await cluster.metrics(), time.monotonic(), memory_mb(cluster)
    flood = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.chaos.flood"),
        *(str(urlsplit(cluster.url).port), str(rate), str(seconds), str(first)),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    listening = asyncio.create_task(flood.communicate())
    while not listening.done():
        await asyncio.wait([listening], timeout=0.5)
        now = memory_mb(cluster)
        peaks = {name: max(peaks.get(name, 0.0), megabytes) for name, megabytes in now.items()}
    heard = [json.loads(line) for line in listening.result()[0].splitlines()]
    assert len(heard) == int(rate * seconds), f"the flood ended early: {len(heard)} of {int(rate * seconds)}"
    after = await cluster.metrics()
    outcomes = [_outcome(began, *entry) for entry in heard]
    result = Overload(
        offered=rate,
        seconds=seconds,
        began=began,
        outcomes=outcomes,
        memory_mb=peaks,
        metrics={name: value - before.get(name, 0.0) for name, value in after.items()},
    )
    result.wrong = checks.wrong(outcomes, oracle.answer) + checks.unanswered(outcomes) + checks.broken(outcomes)
    return result


def _outcome(
    began: float, number: int, sent_s: float, seconds: float, status: int, again: bool, choices: list[Any], code: str,
    broken: str,
) -> Outcome:  # fmt: skip
    asked = Ask(number=number, kind="overload", body=body_of(number), deadline_s=DEADLINE_S)
    return Outcome(
        ask=asked,
        started=began + sent_s,
        ended=began + sent_s + seconds,
        status=status,
        retry_after="yes" if again else "",
        choices={
            one["index"]: Seen(tokens=one["token_ids"], text=one["text"], finish=one["finish_reason"])
            for one in choices
        },
        is_whole=status == 200,
        error=code,
        broken="" if broken == "TimeoutError" else broken,
        overdue=broken == "TimeoutError",
    )


def quantile(metrics: Mapping[str, float], name: str, share: float) -> float:
    """The bound of the bucket below which `share` of a histogram's observations are, over all of its labels; 0 without any."""
    buckets: dict[float, float] = {}
    for entry, count in metrics.items():
        if entry.startswith(f"{name}_bucket{{"):
            bound = float(entry.partition('le="')[2].partition('"')[0])
            buckets[bound] = buckets.get(bound, 0.0) + count
    total = max(buckets.values(), default=0.0)
    return min((bound for bound, count in buckets.items() if total and count >= share * total), default=0.0)


def memory_mb(cluster: ChaosCluster) -> dict[str, float]:
    """Resident memory of each process, in MiB."""
    return {name: _memory(pid) / 2**20 for name, pid in cluster.pids.items()}


def _memory(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0


def hung_up(clients: list[socket.socket]) -> int:
    """How many connections the other side gave up; nothing is read from them."""
    poll = select.poll()
    for client in clients:
        poll.register(client, 0)  # errors and hang-ups are always told
    return len(poll.poll(0))


@contextlib.contextmanager
def deaf_clients(url: str, count: int, *, max_tokens: int) -> Iterator[list[socket.socket]]:
    """Clients that ask for long streams and never read; their kernel takes almost nothing for them."""
    parts = urlsplit(url)
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": [7] * 20,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 10,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    clients = []
    try:
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.connect((parts.hostname, parts.port))
            client.sendall(head.encode() + body)
            clients.append(client)
        yield clients
    finally:
        for client in clients:
            client.close()
