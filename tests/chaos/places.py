"""One tenant's long streams in all places of the decode batch, and another tenant's short requests beside them.

`python -m tests.chaos.places [GATEWAYS]` measures and prints it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.asks import SPECIAL, VOCABULARY, Oracle, Seen
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.models import build_tiny_model

KEYS = {"long": "the-key-of-the-long-one", "short": "the-key-of-the-short-one"}
TENANTS = "".join(f'[tenants.{name}]\nkeys = ["{key}"]\nmax_priority = 5\n' for name, key in KEYS.items())
ADMIN = "the-admin-s-own-key"
DEADLINE_S = 120
PROMPT = 40


@dataclass(slots=True, kw_only=True)
class Crowd:
    """What came of it; times in seconds."""

    alone_s: list[float]
    short_s: list[float]  # of the short requests beside the long ones
    urgent_s: list[float]  # of those with priority 5
    long_s: float  # until all long streams had ended
    wrong: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        told = [f"long streams took {self.long_s:.1f} s in all; wrong answers: {len(self.wrong)}"]
        for name, times in (("alone", self.alone_s), ("beside them", self.short_s), ("priority 5", self.urgent_s)):
            told.append(f"{name}: median {statistics.median(times):.2f} s, longest {max(times):.2f} s of {len(times)}")
        events = {name: value for name, value in self.metrics.items() if "gateway_events" in name}
        return "\n".join([*told, *(f"{name} {value:.0f}" for name, value in sorted(events.items()))])


def slow(tmp: Path, *, places: int, step_ms: int) -> dict[str, Any]:
    """Options of a cluster whose decode worker has few places and takes its time."""
    tmp.mkdir(parents=True, exist_ok=True)
    tenants = tmp / "tenants.toml"
    tenants.write_text(TENANTS)
    gateway = ("--tenants", str(tenants), "--admin-key", ADMIN)
    return {**FAKE, "fake_step_ms": step_ms, "max_sequences": places, "gateway_options": gateway}


async def crowd(cluster: ChaosCluster, oracle: Oracle, *, streams: int, tokens: int, shorts: int) -> Crowd:
    """`streams` of `tokens` each by one tenant; `shorts` requests of 10 tokens by another at the last gateway, one by one."""
    options: dict[str, Any] = {"timeout": DEADLINE_S + 10, "limits": httpx.Limits(max_connections=200)}
    async with (
        httpx.AsyncClient(base_url=cluster.url, **options) as client,
        httpx.AsyncClient(base_url=cluster.urls[cluster.gateways[-1]], **options) as there,
    ):
        alone = [await _timed(_ask(there, oracle, "short", 1000 + n, 10)) for n in range(3)]
        began = time.monotonic()
        long_ones = [asyncio.create_task(_ask(client, oracle, "long", n, tokens)) for n in range(streams)]
        async with asyncio.timeout(30):
            while (await _metrics(client)).get('baton_worker_running_sequences{worker="decode-0"}', 1.0) < 1:
                await asyncio.sleep(0.05)
        beside = [await _timed(_ask(there, oracle, "short", 2000 + n, 10)) for n in range(shorts)]
        urgent = [await _timed(_ask(there, oracle, "short", 3000 + n, 10, priority=5)) for n in range(shorts)]
        ended = await asyncio.gather(*long_ones)
        long_s = time.monotonic() - began
        metrics = await _metrics(client)
    wrong = [*ended, *(text for _, text in (*alone, *beside, *urgent))]
    return Crowd(
        alone_s=[seconds for seconds, _ in alone],
        short_s=[seconds for seconds, _ in beside],
        urgent_s=[seconds for seconds, _ in urgent],
        long_s=long_s,
        wrong=[text for text in wrong if text],
        metrics=metrics,
    )


async def _timed(answer: Awaitable[str]) -> tuple[float, str]:
    began = time.monotonic()
    wrong = await answer
    return time.monotonic() - began, wrong


async def _ask(
    client: httpx.AsyncClient, oracle: Oracle, tenant: str, number: int, tokens: int, *, priority: int = 0
) -> str:
    """One stream. What is wrong with its answer, or ""."""
    body: dict[str, Any] = {
        "model": "tiny", "prompt": [SPECIAL + (number * 7 + n * n) % (VOCABULARY - SPECIAL) for n in range(PROMPT)],
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "timeout": DEADLINE_S,
        "stream": True, "priority": priority,
    }  # fmt: skip
    seen = Seen(tokens=[], text="")
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return f"{tenant} {number}: {event['error']}"
            [choice] = event["choices"] or [{}]
            seen.tokens += choice.get("token_ids") or []
            seen.text += choice.get("text") or ""
            seen.finish = choice.get("finish_reason") or seen.finish
    expected = oracle.answer(body)[0]
    if answer.status_code != 200 or seen != expected:
        return f"{tenant} {number}: status {answer.status_code}, {len(seen.tokens)} of {len(expected.tokens)} tokens"
    return ""


async def _metrics(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics", headers={"authorization": f"Bearer {ADMIN}"})).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def _measure() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "tiny", "llama")
        options = slow(Path(folder) / "options", places=8, step_ms=30)
        gateways = int(sys.argv[1]) if sys.argv[1:] else 1
        async with ChaosCluster(Path(folder) / "cluster", model=model, gateways=gateways, **options) as cluster:
            print(await crowd(cluster, Oracle(model), streams=24, tokens=300, shorts=5))


if __name__ == "__main__":
    asyncio.run(_measure())
