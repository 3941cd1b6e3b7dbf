"""A client that sends a cell's requests to a server: one process, one connection a request, bytes searched instead of parsed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.load.cells import Cell
from benchmarks.load.model import Outcome, Run, tokens_of

TEXT = b'"text"'  # an event of a completion has one
PAUSE_S = 2.0


async def send(cell: Cell, url: str, model: str, *, seconds: float, traces: Path | None, vocabulary: int) -> Outcome:
    """Serve a cell's first seconds by the server at `url`; TTFT counts from the instant when a request was due."""
    for requests in (cell.before, cell.requests):
        if requests is None:
            continue
        runs = [Run(request, cell.goal) for request in requests(seconds, traces)]
        bodies = [_body(run, number, model, vocabulary) for number, run in enumerate(runs)]
        await _all(runs, bodies, url)
        await asyncio.sleep(PAUSE_S)
    return Outcome(runs, passes=0, preemptions=0, plan_ms=0.0)


async def _all(runs: Sequence[Run], bodies: Sequence[bytes], url: str) -> None:
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for run, body in zip(runs, bodies, strict=True):
            await asyncio.sleep(max(0.0, began + run.request.arrival_ms / 1000 - time.monotonic()))
            tasks.create_task(_one(run, body, url, began))


async def _one(run: Run, body: bytes, url: str, began: float) -> None:
    """Send one request; its times count from `began`."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port or 80)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the server said {status!r}: {await reader.read(500)!r}")
    while data := await reader.read(65_536):
        if TEXT in data:
            run.end_at = time.monotonic() - began
            run.first_at = run.first_at or run.end_at
    writer.close()
    if not run.first_at:
        raise RuntimeError("an answer had no token")


def _body(run: Run, number: int, model: str, vocabulary: int) -> bytes:
    goal = run.goal
    return json.dumps(
        {
            "model": model,
            "prompt": [token % vocabulary for token in tokens_of(run.request, number)],
            "max_tokens": run.request.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "ttft_slo_ms": goal.ttft_ms,
            "ttft_slo_ms_per_token": goal.ttft_ms_per_token,
            "tpot_slo_ms": goal.tpot_ms,
        }
    ).encode()
