"""Placement under a virtual clock: Mooncake's public traces on simulated H200s, Baton's own code beside simpler rules.

    python -m benchmarks.simulate --traces ../shared/traces --out benchmarks/results

Real: the Lua functions of `common/store.lua` on a Redis or Valkey server, the block pool. Simulated: the passes' times, by
measured curves (`simulate_costs.py`). The made-up trace is used when there is no `--traces`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis
import torch

from benchmarks.environment import describe
from benchmarks.results_format import Result, ResultsPage, number
from benchmarks.simulate_fleet import Worker
from benchmarks.simulate_policies import RULES, Baton
from benchmarks.simulate_run import (
    TPOT_SLO_MS,
    TTFT_SLO_MS,
    TTFT_SLO_TOKEN_MS,
    Outcome,
    Simulation,
    ideal,
    percentile,
)
from benchmarks.simulate_trace import TraceRequest, conversations, read_trace, replicate, speed_up
from common.servers import run_redis


@dataclass(frozen=True, slots=True)
class Load:
    """One column of the table: a trace at some speed on a fleet."""

    trace: str
    prefill: int
    decode: int
    speed: float
    copies: int = 1
    first: int = 0  # only so many requests of each copy; 0 = all

    @property
    def name(self) -> str:
        copies = f"_{self.copies}_copies" if self.copies > 1 else ""
        return f"{self.trace}_{self.prefill}P{self.decode}D{copies}_x{self.speed:g}"

    def requests(self, traces: Path | None) -> list[TraceRequest]:
        if traces is None:
            trace = list(conversations(self.first or 2000, per_second=10.0))
        else:
            trace = read_trace(traces / f"{self.trace}_trace.jsonl")[: self.first or None]
        return speed_up(replicate(trace, self.copies) if self.copies > 1 else trace, self.speed)

    def fleet(self) -> list[Worker]:
        prefill = [Worker(f"p{number}", "prefill") for number in range(self.prefill)]
        return prefill + [Worker(f"d{number}", "decode") for number in range(self.decode)]


MADE_UP = [Load("made_up", 1, 1, 0.5), Load("made_up", 2, 2, 2)]
LOADS = [
    *(Load("conversation", 4, 4, speed) for speed in (1, 2, 3, 4, 6)),
    *(Load("synthetic", 4, 4, speed) for speed in (1, 2, 3, 4)),
    *(Load("conversation", 32, 32, speed, copies=8, first=3000) for speed in (2, 3, 4)),
    Load("conversation", 512, 512, 4, copies=128, first=400),
]


def simulate(load: Load, client: redis.Redis, traces: Path | None) -> Iterator[Outcome]:
    """Every policy on one load, Baton first."""
    requests = load.requests(traces)
    fleet = load.fleet()
    yield Simulation(requests, fleet, Baton(fleet, client)).run()
    for rule in RULES:
        fleet = load.fleet()
        yield Simulation(requests, fleet, rule(fleet)).run()
    yield ideal(requests)


def results_of(load: Load, outcomes: Sequence[Outcome]) -> Iterator[Result]:
    """All figures of a load; Baton's goodput and hit rate have the best rule's as target and the ideal's as floor."""
    baton, *rules, best = outcomes
    goodput, hits = max(rule.goodput for rule in rules), max(rule.hit_rate for rule in rules)
    for outcome in outcomes:
        own = outcome is baton
        name = f"{load.name}_{outcome.policy}".replace("-", "_")
        yield Result(
            name=f"{name}_goodput",
            value=outcome.goodput,
            unit="req/s",
            better="higher",
            target=goodput or None if own else None,
            floor=best.goodput or None if own else None,
        )
        yield Result(
            name=f"{name}_hit_rate",
            value=100 * outcome.hit_rate,
            unit="%",
            better="higher",
            target=100 * hits or None if own else None,
            floor=100 * best.hit_rate or None if own else None,
        )
        for label, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            yield Result(name=f"{name}_ttft_{label}", value=outcome.ttft_ms(quantile), unit="ms", better="lower")
        yield Result(name=f"{name}_tpot_p99", value=outcome.tpot_ms(0.99), unit="ms", better="lower")
        if outcome.workers:
            yield Result(name=f"{name}_imbalance", value=outcome.imbalance, unit="max/mean", better="lower")
        if outcome.place_ms:
            for label, quantile in (("p50", 0.5), ("p99", 0.99)):
                value = percentile(outcome.place_ms, quantile)
                yield Result(name=f"{name}_placement_{label}", value=value, unit="ms", better="lower")


def table_of(load: Load, outcomes: Sequence[Outcome]) -> str:
    """The same for people."""
    runs = len(outcomes[0].runs)
    lines = [
        f"### {load.name}: {runs:,} requests, {runs / outcomes[0].span_s:.1f} a second\n",
        "| policy | within SLO | goodput, req/s | hit rate | TTFT p50 | p90 | p99, ms | TPOT p50 | p99, ms | imbalance |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for outcome in outcomes:
        cells = [
            outcome.policy,
            f"{outcome.good / runs:.1%}",
            number(outcome.goodput),
            f"{outcome.hit_rate:.1%}",
            *(f"{outcome.ttft_ms(quantile):,.0f}" for quantile in (0.5, 0.9, 0.99)),
            *(f"{outcome.tpot_ms(quantile):,.1f}" for quantile in (0.5, 0.99)),
            f"{outcome.imbalance:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    reasons = ", ".join(f"{reason} {count}" for reason, count in outcomes[0].reasons.most_common())
    return "\n".join(lines) + f"\n\nBaton's reasons: {reasons}.\n"


async def run(options: argparse.Namespace, arguments: Sequence[str]) -> ResultsPage:
    """Simulate every load and keep the page up to date."""
    facts = describe("benchmarks.simulate", arguments, torch.device("cpu"), commit=options.commit)
    facts["SLO"] = f"TTFT ≤ {TTFT_SLO_MS:g} ms + {TTFT_SLO_TOKEN_MS:g} ms a prompt token, TPOT ≤ {TPOT_SLO_MS:g} ms"
    page = ResultsPage(options.out, "simulate", title="Placement, simulated", facts=facts)
    loads = LOADS if options.traces else MADE_UP
    with tempfile.TemporaryDirectory(prefix="baton-simulate-") as data:
        async with run_redis(data_dir=Path(data)) as server:
            client = redis.Redis.from_url(server.url, protocol=2)
            page.state("server", f"{client.info()['redis_version']} (as Redis)")
            tables = []
            for load in loads:
                began = time.monotonic()
                outcomes = list(simulate(load, client, options.traces))
                tables.append(table_of(load, outcomes))
                page.notes = "## Loads\n\n" + "\n".join(tables)
                page.add(*results_of(load, outcomes))
                print(f"{tables[-1]}({time.monotonic() - began:.1f} s)\n", flush=True)
            client.close()
    return page


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for simulate.json and simulate.md")
    parser.add_argument("--traces", type=Path, help="folder with conversation_trace.jsonl and synthetic_trace.jsonl")
    parser.add_argument("--commit", default="", help="what the page names when the repository has no history here")
    asyncio.run(run(parser.parse_args(arguments), arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
