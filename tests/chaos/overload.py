"""More than can be served, and clients that don't read: refusals are quick and say when to come back, memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import psutil

from tests.chaos import checks
from tests.chaos.asks import Ask, Oracle
from tests.chaos.cluster import ChaosCluster
from tests.chaos.load import Outcome, request

PROMPT_TOKENS, ANSWER_TOKENS = 100, 8
DEADLINE_S = 3.0
CONNECTIONS = 2000


@dataclass(slots=True, kw_only=True)
class Overload:
    """What `offered` requests a second for `seconds` led to; latencies in seconds."""

    offered: float
    seconds: float
    outcomes: list[Outcome]
    memory_mb: float  # of all processes at its peak
    wrong: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Whole answers a second."""
        return sum(outcome.is_whole for outcome in self.outcomes) / self.seconds

    @property
    def refused(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status in (429, 503)]

    @property
    def refusal_p99_s(self) -> float:
        """Of requests that were refused at all; 0 when none was."""
        times = sorted(outcome.ended - outcome.started for outcome in self.refused)
        return statistics.quantiles(times, n=100)[98] if len(times) > 1 else sum(times)

    @property
    def without_retry_after(self) -> int:
        return sum(not outcome.retry_after for outcome in self.refused)


def _asks(number: int) -> Ask:
    body = {
        "model": "tiny", "prompt": [number % 480 + 3, *range(10, 9 + PROMPT_TOKENS)], "max_tokens": ANSWER_TOKENS,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True, "timeout": DEADLINE_S,
    }  # fmt: skip
    return Ask(number=number, kind="overload", body=body, deadline_s=DEADLINE_S)


async def offer(cluster: ChaosCluster, oracle: Oracle, *, rate: float, seconds: float, first: int) -> Overload:
    """Send `rate` requests a second, whatever comes back."""
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    tasks: list[asyncio.Task[Outcome]] = []
    peak = 0.0
    async with httpx.AsyncClient(base_url=cluster.url, timeout=None, limits=limits) as client:
        began = time.monotonic()
        for index in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + index / rate - time.monotonic()))
            tasks.append(asyncio.create_task(request(client, _asks(first + index))))
            if index % 50 == 0:
                peak = max(peak, memory_mb(cluster))
        outcomes = list(await asyncio.gather(*tasks))
    took = time.monotonic() - began
    result = Overload(offered=rate, seconds=min(took, seconds + DEADLINE_S), outcomes=outcomes, memory_mb=peak)
    result.wrong = checks.wrong(outcomes, oracle.answer) + checks.unanswered(outcomes) + checks.broken(outcomes)
    return result


def memory_mb(cluster: ChaosCluster) -> float:
    """Resident memory of all processes, in MiB."""
    return sum(_memory(pid) for pid in cluster.pids.values()) / 2**20


def _memory(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0


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
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
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
