"""More connections than a gateway keeps open: it has its bound of them, and whom it serves notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import psutil

from tests.chaos.cluster import ChaosCluster

SILENT_FOR_S = 3.0  # who hears nothing for so long was let in: refusals come at once


async def crowd(cluster: ChaosCluster, count: int) -> tuple[Counter[str], int]:
    """Open `count` connections that ask nothing. Returns how many were "let in", "told", "cut off", and the sockets that remain.

    In between the gateway has more: all that waited to be accepted are, before the first of them is looked at.
    """
    port = int(cluster.url.rpartition(":")[2])
    heard: Counter[str] = Counter()
    gateway = psutil.Process(cluster.processes["gateway"].pid)
    async with contextlib.AsyncExitStack() as stack:

        async def one() -> None:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                async with asyncio.timeout(SILENT_FOR_S):
                    answer = await reader.read(4096)
                heard["told" if answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in answer else "cut off"] += 1
            except TimeoutError:
                heard["let in"] += 1
            except OSError:
                heard["cut off"] += 1

        await asyncio.gather(*(one() for _ in range(count)))
        remaining = sum(entry.laddr.port == port for entry in gateway.net_connections("tcp"))
    return heard, remaining
