"""The effect of arriving long prompts on other clients: how late streams and /health are, and the gateway's memory.

    python -m benchmarks.gateway.long_prompts [--rounds 3] [--json FILE]       two cores, about two minutes

One Baton with the fake device and a context of 131,072 tokens. A process of its own asks /health and watches a stream. Before
each prompt nothing is asked for a time as long as its own: what was late then is the machine's. Of each such time the greatest
lateness counts, of several the median, with and without a prompt; their difference is the prompt's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import psutil
import torch

from benchmarks.environment import ROOT, describe
from benchmarks.gateway.serving import fake_baton

CONTEXT = 131_072
STEP_MS = 5.0
PAUSE_S = 0.005  # between two questions for /health
QUIET_S = 3.0
QUIET = "nothing before "
AFTER_S = 0.3  # in which what a prompt held up is seen
WORDS = "the quick brown fox jumps over the lazy dog and "
CHINESE = "今天天气很好，我们去公园玩。"


@dataclass(frozen=True, slots=True)
class Phase:
    """A prompt's time, and the gateway's memory before and after it."""

    name: str
    status: str
    began: float
    ended: float
    before: int
    after: int


def texts() -> dict[str, str]:
    """Prompts by the names of their rows."""
    return {
        "1 MB": WORDS * (1_000_000 // len(WORDS)),
        "4 MB": WORDS * (4_000_000 // len(WORDS)),
        "9.9 MB": WORDS * (9_900_000 // len(WORDS)),
        "9.9 MB of one letter": "x" * 9_900_000,
        "9.9 MB of spaces": " " * 9_900_000,
        "words that just fit": WORDS * 8_500,
        "Chinese that just fits": CHINESE * 3_000,
        "HTML that just fits": "<b>the</b> " * 15_000,
    }


def main(arguments: Sequence[str]) -> int:
    """Print the figures; with --json write them as well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each prompt is sent, to chat and to completions"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.watch:
        return asyncio.run(_watch(options.watch))
    facts = describe("benchmarks.gateway.long_prompts", arguments, torch.device("cpu"))
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    rows = _rows(options.rounds)
    for row in rows:
        print(
            f"{row['prompt']:24} {row['status']:12} {row['answer_s']:6.2f} s   a stream {row['stream_ms']:5.1f} ms late, "
            f"without {row['stream_quiet_ms']:5.1f}: {row['stream_ms'] - row['stream_quiet_ms']:+6.1f}   "
            f"/health {row['health_ms']:5.1f} ms, without {row['health_quiet_ms']:5.1f}   "
            f"{row['before_mb']:4.0f} → {row['after_mb']:4.0f} MB"
        )
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    return 0


def _rows(rounds: int) -> list[dict[str, float | str]]:
    with fake_baton("--max-model-len", str(CONTEXT), step_ms=STEP_MS, token_us=1.0) as (port, _, services):
        url, gateway = f"http://127.0.0.1:{port}", services["gateway"]
        command = [sys.executable, "-m", "benchmarks.gateway.long_prompts", "--watch", url]
        watcher = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        phases = asyncio.run(_phases(url, gateway, rounds))
        seen = json.loads(watcher.communicate(b"\n", timeout=60)[0])
    return [_row(name, phases, seen) for name in texts()]


async def _phases(url: str, gateway: psutil.Process, rounds: int) -> list[Phase]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.sleep(2 * QUIET_S)  # everything is warm
        phases: list[Phase] = []
        for name, text in texts().items():
            took_s = QUIET_S / 6
            for path in ("/v1/chat/completions", "/v1/completions") * rounds:
                phases.append(await _phase(QUIET + name, gateway, asyncio.sleep(took_s)))
                phases.append(await _phase(name, gateway, _ask(client, path, text)))
                took_s = phases[-1].ended - phases[-1].began
        await asyncio.sleep(QUIET_S)
    return phases


async def _ask(client: httpx.AsyncClient, path: str, text: str) -> str:
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    answer = await client.post(path, json={"model": "demo", "max_tokens": 1, **asked})
    return str(answer.json()["error"]["code"] if answer.is_error else answer.json()["usage"]["prompt_tokens"])


async def _phase(name: str, gateway: psutil.Process, work: Awaitable[str | None]) -> Phase:
    before, began = gateway.memory_info().rss, time.monotonic()
    status = await work
    ended = time.monotonic()
    await asyncio.sleep(AFTER_S)
    return Phase(name, status or "", began, ended, before, gateway.memory_info().rss)


def _row(name: str, every: list[Phase], seen: dict[str, list[tuple[float, float]]]) -> dict[str, float | str]:
    phases, quiet = ([one for one in every if one.name == which] for which in (name, QUIET + name))
    late, usual = ({kind: _lateness(which, found) for kind, found in seen.items()} for which in (phases, quiet))
    status = phases[0].status
    return {
        "prompt": name,
        "status": "too long" if status == "context_length_exceeded" else status,
        "answer_s": max(one.ended - one.began for one in phases),
        "stream_ms": 1e3 * late["stream"],
        "stream_quiet_ms": 1e3 * usual["stream"],
        "health_ms": 1e3 * late["health"],
        "health_quiet_ms": 1e3 * usual["health"],
        "before_mb": phases[0].before / 1e6,
        "after_mb": phases[-1].after / 1e6,
    }


def _lateness(phases: list[Phase], found: list[tuple[float, float]]) -> float:
    """The median of the phases' greatest, of those in which something was seen: a stream may begin anew just then."""
    seen = ([late for at, late in found if one.began <= at <= one.ended + AFTER_S] for one in phases)
    return median(max(lates) for lates in seen if lates)


async def _watch(url: str) -> int:
    """Until a line comes: when something was seen, and how late it was."""
    seen: dict[str, list[tuple[float, float]]] = {"stream": [], "health": []}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        tasks = [
            asyncio.create_task(_watch_stream(client, seen["stream"])),
            asyncio.create_task(_watch_health(client, seen["health"])),
        ]
        await asyncio.to_thread(sys.stdin.readline)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(seen))
    return 0


async def _watch_stream(client: httpx.AsyncClient, seen: list[tuple[float, float]]) -> None:
    body = {"model": "demo", "prompt": [5], "max_tokens": 2_000, "ignore_eos": True, "stream": True}
    while True:
        gaps, last = [], 0.0
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    now = time.monotonic()
                    if last:
                        gaps.append((now, now - last))
                    last = now
        finally:  # the last stream is cut where the watching ends
            usual = median(gap for _, gap in gaps) if gaps else 0.0
            seen += [(at, gap - usual) for at, gap in gaps]


async def _watch_health(client: httpx.AsyncClient, seen: list[tuple[float, float]]) -> None:
    while True:
        began = time.monotonic()
        await client.get("/health")
        seen.append((began, time.monotonic() - began))
        await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
