"""A load generator: streamed completions over plain HTTP/1.1, Poisson arrivals, one connection a request in flight.

Prompts are token ids, random and distinct, so the prefix cache finds nothing. Times are the client's, as `vllm bench serve`
takes them: TTFT from sending the request to the first chunk, ITL between chunks, TPOT = (last - first) / (tokens - 1).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """One request as its client saw it; seconds. `error` is "" for a whole answer."""

    arrived: float
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float = 0.0
    error: str = ""

    @property
    def tpot(self) -> float:
        return (self.ended - self.arrived - self.ttft) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`rate` 0: one request after the other."""

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
    connections: list[_Connection] = []
    tasks = []
    due = time.perf_counter()
    for body in bodies:
        if load.rate:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += random_.expovariate(load.rate)
        connection = connections.pop() if connections else await _Connection.open(host, port)
        task = asyncio.create_task(_ask(connection, body, connections))
        tasks.append(task)
        if not load.rate:
            await task
    return list(await asyncio.gather(*tasks))


async def _ask(connection: _Connection, body: bytes, idle: list[_Connection]) -> Sample:
    sample = Sample(arrived=time.perf_counter())
    try:
        await connection.complete(body, sample)
        idle.append(connection)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
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


class _Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def open(cls, host: str, port: int) -> _Connection:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        return cls(reader, writer, f"{host}:{port}")

    async def complete(self, body: bytes, sample: Sample) -> None:
        """Send one request and take its chunks' times. Raises ValueError for an answer that is no whole stream."""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        sample.arrived = last = time.perf_counter()
        self._writer.write(head.encode() + body)
        status = (await self._reader.readline()).split(b" ", 2)
        while (await self._reader.readline()).strip():
            pass
        if status[1:2] != [b"200"]:
            self._writer.close()
            raise ValueError(f"HTTP {b' '.join(status).decode().strip()}")
        done = False
        while size := int((await self._reader.readline()).strip() or b"0", 16):
            chunk = await self._reader.readexactly(size + 2)
            now = time.perf_counter()
            for line in chunk.split(b"\n"):
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                event = json.loads(line[6:])
                if event.get("error"):
                    raise ValueError(str(event["error"]))
                if event.get("usage"):
                    sample.tokens = event["usage"]["completion_tokens"]
                if event.get("choices"):
                    if not sample.ttft:
                        sample.ttft = now - sample.arrived
                    else:
                        sample.gaps.append(now - last)
                    last = now
        await self._reader.readline()
        sample.ended = last
        if not done:
            raise ValueError("the stream ended early")


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the closest ranks; `share` in [0, 1]."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
