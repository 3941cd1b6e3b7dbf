"""The benchmarks' load: Poisson arrivals of prompts that share nothing, through `baton bench`'s client.

Prompts are token ids, random and distinct, so the prefix cache finds nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

from cli.bench.client import ERRORS, Connection, Sample, Target, percentile
from cli.bench.load import poisson

__all__ = ["Load", "Sample", "percentile", "run_load"]

PAUSE_S = 0.01  # until the gateway is through with the request before


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Number, size and arrival rate of requests.

    With rate 0 each is sent after the answer before it.
    """

    prompt: int
    answer: int
    rate: float
    count: int
    vocab_size: int
    seed: int = 0


async def run_load(host: str, port: int, model: str, load: Load) -> list[Sample]:
    """Send the load; return its samples in the order of arrival."""
    random_ = random.Random(load.seed)
    bodies = [_body(model, load, random_) for _ in range(load.count)]
    connections: list[Connection] = []
    tasks = []
    arrivals = poisson(load.count, load.rate, random_)
    began_at = time.monotonic()
    for body, due_s in zip(bodies, arrivals, strict=True):
        if load.rate:
            await asyncio.sleep(max(0.0, began_at + due_s - time.monotonic()))
        connection = connections.pop() if connections else await Connection.open(Target(host, port))
        task = asyncio.create_task(_ask(connection, body, connections))
        tasks.append(task)
        if not load.rate:
            await task
            await asyncio.sleep(PAUSE_S)
    return list(await asyncio.gather(*tasks))


async def _ask(connection: Connection, body: bytes, idle: list[Connection]) -> Sample:
    sample = Sample(arrived=time.monotonic())
    try:
        await connection.complete(body, sample)
        idle.append(connection)
    except ERRORS as error:
        connection.close()
        sample.error = f"{type(error).__name__}: {error}"
    return sample


def _body(model: str, load: Load, random_: random.Random) -> bytes:
    request = {
        "model": model,
        "prompt": [random_.randrange(load.vocab_size) for _ in range(load.prompt)],
        "max_tokens": load.answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request).encode()
