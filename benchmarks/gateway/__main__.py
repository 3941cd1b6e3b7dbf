"""The gateway's cost: CPU time of its process for a streamed token and for a request, and what it adds to a token's way.

    python -m benchmarks.gateway --out benchmarks/results            two cores, about six minutes
    python -m benchmarks.gateway --cells 'streams_64' --rounds 2     prints a part, writes nothing

The gateway has a core of its own; worker (the fake device), NATS, Valkey and clients share the other. A token's cost is the slope
between answers of 4 and of 260 tokens, a request's what is left beside its tokens. Beside it stand an echo of FastAPI and a bare
asyncio protocol on the same core, which write the same events at the same pace; all arms take turns. In `late` the gateway stands
still three quarters of the time, so that tokens wait for it: in `backlog` it keeps up with whatever feeds it.

Times that clients see are taken while no other program may come between, if this user may ask for that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.environment import ROOT, describe
from benchmarks.gateway.client import Counts, chat, load
from benchmarks.gateway.serving import Arm, Baton, baton, pin_this, plain, undisturbed
from benchmarks.results_format import Result, ResultsPage, notes_of

REFERENCE = "Baton at 905a377, 2026-11-22, the same method on this kind of machine (load 2 to 9)"
SHORT, LONG = 4, 260  # tokens
STEP_MS, BACKLOG_STEP_MS = 15.0, 2.0
WORDS = "the quick brown fox jumps over the lazy dog and "
TEXT_2000 = WORDS * 133  # so many tokens of the demo model, with its template
SETTLE_S = 0.4  # until what ends a request is done
PLAIN = ("fastapi", "protocol")
TOGETHER, LATENCY_STREAMS = 64, 64
BURSTS = 5
IDLE_S = 4.0
DRAFTS, DRAFTS_STREAMS = "drafts_64", 64
# Three tokens drafted from the same answer before, and the one behind them.
DRAFTING = json.dumps({"method": "suffix", "num_speculative_tokens": 3, "enable_adaptive_verification": False})
HELD_S, FREE_S = 0.06, 0.02  # of `late`: the gateway stands still, and runs


@dataclass(frozen=True, slots=True)
class Aim:
    """The reference of a figure."""

    target: float | None = None
    before: float | None = None


AIMS = {
    "streams_8": Aim(before=108),
    "streams_64": Aim(28, 57),
    "streams_256": Aim(22, 38.5),
    "backlog_128": Aim(12, 26.7),
    "request_short": Aim(1.3, 2.2),
    "request_2000": Aim(3.5, 5.1),
    "together_64": Aim(40),
    "latency_64_p50": Aim(2.0, 3.7),
    DRAFTS: Aim(1.0),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one arm's load."""

    cpu_s: float
    counts: Counts


@dataclass(slots=True)
class Bench:
    """The cells that were chosen, their results, and whatever serves them."""

    page: ResultsPage | None
    cells: re.Pattern[str]
    rounds: int

    def wants(self, *names: str) -> bool:
        return any(self.cells.search(name) for name in names)

    def add(self, name: str, value: float, unit: str) -> None:
        aim = AIMS.get(name, Aim())
        result = Result(name=name, value=value, unit=unit, better="lower", target=aim.target, reference=aim.before)
        print(f"{name:32} {value:9.3f} {unit:4} {'' if aim.target is None else f'target {aim.target:g}'}", flush=True)
        if self.page is not None:
            self.page.add(result)


def main(arguments: Sequence[str]) -> int:
    """Print the table; with --out write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cells", default=".", help="a regular expression that finds the cells' names")
    options = parser.parse_args(arguments)
    facts = describe("benchmarks.gateway", arguments, torch.device("cpu"))
    facts["versions"] += "".join(f", {name} {version(name)}" for name in ("uvicorn", "fastapi", "httptools", "msgspec"))
    facts["load"] = (
        ", ".join(f"{one:.1f}" for one in os.getloadavg()) + f" over 1, 5, 15 minutes; {os.cpu_count()} cores"
    )
    facts["reference"] = REFERENCE
    print(*(f"{name}: {fact}" for name, fact in facts.items()), sep="\n")
    page = None
    if options.out is not None:
        notes = notes_of("gateway")
        page = ResultsPage(options.out, "gateway", title="What the gateway costs", facts=facts, notes=notes)
    pin_this()
    asyncio.run(_run(Bench(page, re.compile(options.cells), options.rounds)))
    return 0


async def _run(bench: Bench) -> None:
    if bench.wants("streams_8", "streams_64", "streams_256", "latency_64", "together_64", "idle"):
        async with baton(STEP_MS) as served:
            with _beside(STEP_MS) as others:
                await load(served.gateway.port, chat(SHORT), streams=64, requests=256)  # everything is warm
                for streams in (8, 64, 256):
                    await _slopes(bench, f"streams_{streams}", [served.gateway, *others], streams)
            await _latency(bench, served)
            await _together(bench, served)
            await _idle(bench, served)
    if bench.wants("backlog_128", "late_128", "request_short", "request_2000"):
        async with baton(BACKLOG_STEP_MS) as served:
            with _beside(BACKLOG_STEP_MS) as others:
                await load(served.gateway.port, chat(SHORT), streams=64, requests=256)
                await _slopes(bench, "backlog_128", [served.gateway, *others], 128)
            await _slopes(bench, "late_128", [served.gateway], 128, held=True)
            await _requests(bench, "request_short", served, lambda count: chat(count))
            await _requests(bench, "request_2000", served, lambda count: chat(count, text=TEXT_2000))
    if bench.wants(DRAFTS):
        async with baton(STEP_MS, "--speculative-config", DRAFTING) as served:
            await _drafts(bench, served)


def _beside(step_ms: float) -> ExitStack:
    """The plain servers, as a list."""

    class Arms(ExitStack):
        def __enter__(self) -> list[Arm]:  # type: ignore[override]
            super().__enter__()
            return [self.enter_context(plain(kind, step_ms)) for kind in PLAIN]

    return Arms()


async def _cost(arm: Arm, body: bytes, *, streams: int, requests: int = 0, held: bool = False) -> Cost:
    with undisturbed(dict.fromkeys([*arm.pids, os.getpid()], 10)):  # others would empty the core's caches
        began = arm.cpu_s()
        holding = asyncio.create_task(_hold(arm.pid)) if held else None
        counts = await load(arm.port, body, streams=streams, requests=requests)
        if holding is not None:
            holding.cancel()
        await asyncio.sleep(SETTLE_S)
        return Cost(arm.cpu_s() - began, counts)


async def _hold(pid: int) -> None:
    """Have the process stand still most of the time: whatever comes then is late."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(HELD_S)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(FREE_S)
    finally:
        os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Slope:
    """The cost of one arm's tokens and requests, and of the long answers that it comes from."""

    token_us: float
    request_ms: float
    long: Cost


async def _slope(arm: Arm, streams: int, *, held: bool = False, **more: Any) -> Slope:
    """`more`: fields of the requests."""
    short = await _cost(arm, chat(SHORT, **more), streams=streams, requests=2 * streams, held=held)
    long = await _cost(arm, chat(LONG, **more), streams=streams, held=held)
    token = (long.cpu_s / streams - short.cpu_s / (2 * streams)) / (LONG - SHORT)
    return Slope(1e6 * token, 1e3 * (short.cpu_s / (2 * streams) - SHORT * token), long)


async def _slopes(bench: Bench, name: str, arms: list[Arm], streams: int, *, held: bool = False) -> None:
    """Microseconds a token and milliseconds a request, of each arm in turn."""
    if not bench.wants(name):
        return
    found: dict[str, list[Slope]] = {arm.name: [] for arm in arms}
    events: list[float] = []
    busy: list[float] = []
    for _ in range(bench.rounds):
        for arm in arms:
            slope = await _slope(arm, streams, held=held)
            long = slope.long
            found[arm.name].append(slope)
            if arm.name == "baton":
                events.append(long.counts.reads / streams / LONG)
                busy.append(100 * long.cpu_s / (long.counts.seconds + SETTLE_S))
    for arm_name, figures in found.items():
        own = name if arm_name == "baton" else f"{name}_{arm_name}"
        bench.add(own, median(one.token_us for one in figures), "us")
        bench.add(f"{own}_request", max(0.0, median(one.request_ms for one in figures)), "ms")
    bench.add(f"{name}_reads_a_token", median(events), "1")
    bench.add(f"{name}_busy", median(busy), "%")


async def _drafts(bench: Bench, served: Baton) -> None:
    """A token's cost where four come in one event, as a share of one where each has its own: the same answers, in turn."""
    same: dict[str, Any] = {"temperature": 0}  # so that each answer is drafted from the one before
    await load(served.gateway.port, chat(LONG, **same), streams=1)
    alone, together, events = list[float](), list[float](), list[float]()
    for _ in range(bench.rounds):
        alone.append((await _slope(served.gateway, DRAFTS_STREAMS, **same, speculation=False)).token_us)
        slope = await _slope(served.gateway, DRAFTS_STREAMS, **same)
        together.append(slope.token_us)
        events.append(DRAFTS_STREAMS * LONG / slope.long.counts.events)
    bench.add(DRAFTS, median(four / one for four, one in zip(together, alone, strict=True)), "1")
    bench.add(f"{DRAFTS}_alone", median(alone), "us")
    bench.add(f"{DRAFTS}_together", median(together), "us")
    bench.add(f"{DRAFTS}_tokens_an_event", median(events), "1")


async def _requests(bench: Bench, name: str, served: Baton, body: Callable[[int], bytes]) -> None:
    """Milliseconds of a request beside its tokens, 8 in flight."""
    if not bench.wants(name):
        return
    found = []
    few, many, count = 32, 96, 128
    for _ in range(bench.rounds):
        short = await _cost(served.gateway, body(few), streams=8, requests=count)
        long = await _cost(served.gateway, body(many), streams=8, requests=count)
        token = (long.cpu_s - short.cpu_s) / count / (many - few)
        found.append(1e3 * (short.cpu_s / count - few * token))
    bench.add(name, median(found), "ms")


async def _latency(bench: Bench, served: Baton) -> None:
    """From the frame on NATS to the event at the client, of the stream that asked last."""
    for streams in (0, LATENCY_STREAMS):
        if not bench.wants(f"latency_{streams}_p50"):
            continue
        late = []
        for _ in range(bench.rounds):
            loads = asyncio.create_task(load(served.gateway.port, chat(500), streams=streams)) if streams else None
            await asyncio.sleep(1.5)
            late += [seconds for _, seconds in (await _watched(served, 300, asyncio.sleep(0)))[20:]]
            if loads is not None:
                await loads
        late.sort()
        bench.add(f"latency_{streams}_p50", 1e3 * late[len(late) // 2], "ms")
        bench.add(f"latency_{streams}_p99", 1e3 * late[len(late) * 99 // 100], "ms")


async def _together(bench: Bench, served: Baton) -> None:
    """The delay of a running stream by requests that arrive together: its latest token, beyond the usual."""
    if not bench.wants("together_64"):
        return
    bursts: list[tuple[float, float]] = []

    async def burst() -> None:
        await asyncio.sleep(1)
        for _ in range(BURSTS):
            began = time.monotonic()
            await load(served.gateway.port, chat(SHORT), streams=TOGETHER)
            bursts.append((began, time.monotonic()))
            await asyncio.sleep(0.5)

    late = await _watched(served, 600, burst())
    holds = [max((seconds for at, seconds in late if began <= at <= ended), default=0.0) for began, ended in bursts]
    bench.add("together_64", 1e3 * median(holds), "ms")


async def _watched(served: Baton, tokens: int, meanwhile: object) -> list[tuple[float, float]]:
    """A watched stream, and what is done beside it."""
    nats_port = urlsplit(served.nats_url).port
    command = [
        sys.executable,
        "-m",
        "benchmarks.gateway.watcher",
        str(served.gateway.port),
        str(nats_port),
        str(tokens),
    ]
    watcher = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE, limit=1 << 24)
    assert watcher.stdout is not None
    await watcher.stdout.readline()
    ranks = dict.fromkeys(served.gateway.pids, 10) | {os.getpid(): 10, watcher.pid: 20}
    with undisturbed(ranks) as alone:
        if not alone:
            print("this user may not keep other programs away: times are longer than they should be")
        await meanwhile  # type: ignore[misc]
        found = json.loads(await watcher.stdout.readline())
    await watcher.wait()
    return [(at, late) for at, late in found]


async def _idle(bench: Bench, served: Baton) -> None:
    if not bench.wants("idle"):
        return
    await asyncio.sleep(1)
    began = served.gateway.cpu_s()
    await asyncio.sleep(IDLE_S)
    bench.add("idle", 100 * (served.gateway.cpu_s() - began) / IDLE_S, "%")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
