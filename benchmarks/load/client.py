"""A client that sends a cell's requests to a server: one process, one connection a request, bytes searched instead of parsed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks.load.cells import Cell
from benchmarks.load.model import Outcome, Run, tokens_of

TEXT = b'"text"'  # an event of a completion has one
PAUSE_S = 2.0
ASK_S = 10.0
REFUSAL_BYTES = 2_000


@dataclass(frozen=True, slots=True)
class Served:
    """A model at a server."""

    url: str
    model: str
    longest: int  # prompt and answer together; longer requests of a load are left out
    vocabulary: int  # prompts have token ids below it


def served_at(url: str, model: str, vocabulary: int) -> Served:
    """The model of that name at a server, or its first one. Raises LookupError, and OSError where none answers."""
    with urlopen(f"{url}/v1/models", timeout=ASK_S) as answer:
        listed = json.load(answer)["data"]
    found = next((one for one in listed if model in ("", one["id"])), None)
    if found is None:
        raise LookupError(f"{url} has no model {model!r}")
    return Served(url, found["id"], int(found.get("max_model_len") or 1 << 30), vocabulary)


async def send(cell: Cell, served: Served, *, seconds: float, traces: Path | None) -> Outcome:
    """Serve a cell's first seconds by a server; TTFT counts from the instant when a request was due."""
    runs: list[Run] = []
    for requests in (cell.before, cell.requests):
        if requests is None:
            continue
        made = [Run(request, cell.goal) for request in requests(seconds, traces)]
        runs = [run for run in made if run.request.prompt_tokens + run.request.answer_tokens <= served.longest]
        bodies = [_body(run, number, served) for number, run in enumerate(runs)]
        await _all(runs, bodies, served.url)
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
        run.refusal = (status + await reader.read(REFUSAL_BYTES)).decode(errors="replace")
    while data := await reader.read(65_536):
        if TEXT in data and not run.refusal:
            run.end_at = time.monotonic() - began
            run.first_at = run.first_at or run.end_at
    writer.close()
    run.refusal = run.refusal or ("" if run.first_at else "an answer without a token")


def _body(run: Run, number: int, served: Served) -> bytes:
    goal = run.goal
    return json.dumps(
        {
            "model": served.model,
            "prompt": [token % served.vocabulary for token in tokens_of(run.request, number)],
            "max_tokens": run.request.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "ttft_slo_ms": goal.ttft_ms,
            "ttft_slo_ms_per_token": goal.ttft_ms_per_token,
            "tpot_slo_ms": goal.tpot_ms,
        }
    ).encode()
