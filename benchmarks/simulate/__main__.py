"""Placement under a virtual clock: Mooncake's public traces on simulated H200s, Baton's own code beside simpler rules.

    python -m benchmarks.simulate --traces ../shared/traces --out benchmarks/results

Real: the Lua functions of placement on a Redis or Valkey server, admission, the planner's decisions, the block pool.
Simulated: the passes' times, by measured curves (`simulate_costs.py`). Without `--traces` the trace is made up and small.
`--load conversation_6P2D_x3` runs that load alone (may be given again); the page then has no notes and no placement times.
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
from benchmarks.results_format import Result, ResultsPage, notes_of, number
from benchmarks.simulate.fleet import Worker
from benchmarks.simulate.gateway import Gate, Roles
from benchmarks.simulate.policies import RULES, Baton, by_costs, never
from benchmarks.simulate.run import (
    TPOT_SLO_MS,
    TTFT_SLO_MS,
    TTFT_SLO_TOKEN_MS,
    Outcome,
    Simulation,
    ideal,
    percentile,
    ttft_slo_ms,
)
from benchmarks.simulate.scale import placement_times
from benchmarks.simulate.trace import TraceRequest, a_day, conversations, read_trace, replicate, speed_up
from benchmarks.simulate.two_cards import pushed_prefix, replicas, turns_stay
from gateway.admission.policy import RequestLimits
from planner.settings import PlanSettings
from services.runtime.servers import run_redis

COLUMNS = ("policy", "within SLO", "goodput, req/s", "hit rate", "TTFT p50", "p90", "p99, ms", "TPOT p50", "p99, ms")
COLUMNS = (*COLUMNS, "regret mean", "p99, ms", "imbalance", "refused", "placement p50, ms")
ROLES = ("baton-admission", "baton-roles")
TWO_CARDS = ("baton", "baton-admission", "baton-turns", "baton-pushed")
VARIANTS = ("baton", "baton-remote", *ROLES, "baton-turns", "baton-pushed")


@dataclass(frozen=True, slots=True)
class Load:
    """A trace at some speed on a fleet, and the forms of Baton that serve it beside the plain one."""

    trace: str
    prefill: int
    decode: int
    speed: float
    copies: int = 1
    first: int = 2000  # only so many requests of each copy
    variants: tuple[str, ...] = ("baton", "baton-remote", "baton-admission")
    is_day: bool = False  # its rate and its mix change as in a day
    both: int = 0  # workers of both roles

    @property
    def name(self) -> str:
        copies = f"_{self.copies}_copies" if self.copies > 1 else ""
        day = "_day" if self.is_day else ""
        workers = f"{self.both}B" if self.both else f"{self.prefill}P{self.decode}D"
        return f"{self.trace}{day}_{workers}{copies}_x{self.speed:g}"

    def requests(self, traces: Path | None) -> list[TraceRequest]:
        if traces is None:
            trace = list(conversations(self.first, per_second=10.0))
        else:
            trace = read_trace(traces / f"{self.trace}_trace.jsonl")[: self.first]
        faster = speed_up(replicate(trace, self.copies) if self.copies > 1 else trace, self.speed)
        return a_day(faster) if self.is_day else faster

    def fleet(self) -> list[Worker]:
        prefill = [Worker(f"p{number}", "prefill") for number in range(self.prefill)]
        prefill += [Worker(f"b{number}", "prefill", "decode") for number in range(self.both)]
        return prefill + [Worker(f"d{number}", "decode") for number in range(self.decode)]


MADE_UP = [
    Load("made_up", 1, 1, 0.5, first=200, variants=VARIANTS),
    Load("made_up", 0, 0, 0.5, first=100, variants=TWO_CARDS, both=2),
    Load("made_up", 2, 2, 8, first=300),
]
LOADS = [
    *(Load("conversation", 0, 0, speed, first=800, variants=TWO_CARDS, both=2) for speed in (0.4, 0.6)),
    *(Load("conversation", 1, 1, speed, first=800, variants=TWO_CARDS) for speed in (0.4, 0.6)),
    Load("synthetic", 0, 0, 0.8, first=800, variants=TWO_CARDS, both=2),
    Load("synthetic", 1, 1, 0.8, first=800, variants=TWO_CARDS),
    *(Load("conversation", 4, 4, speed) for speed in (1, 2.5, 5)),
    Load("synthetic", 4, 4, 2),
    Load("conversation", 6, 2, 3, variants=VARIANTS),
    Load("conversation", 2, 6, 2, variants=VARIANTS),
    *(Load("conversation", p, 8 - p, 2.5, first=4000, variants=ROLES, is_day=True) for p in (6, 2)),
    Load("conversation", 4, 4, 3, first=4000, variants=ROLES, is_day=True),
    Load("conversation", 32, 32, 2.5, copies=8, first=400, variants=("baton",)),
    Load("conversation", 512, 512, 2.5, copies=128, first=40, variants=("baton",)),
]
SIZES = (4, 64, 512, 4000)


def simulate(load: Load, client: redis.Redis, traces: Path | None) -> Iterator[Outcome]:
    """Every policy on one load: Baton first, then its variants, the rules, and the ideal."""
    requests = load.requests(traces)
    for variant in load.variants:
        fleet = load.fleet()
        policy = baton_of(variant, fleet, client)
        gate = None if variant in ("baton", "baton-remote") else Gate(policy.states, RequestLimits())
        roles = Roles(plan_settings(requests)) if variant == "baton-roles" else None
        yield Simulation(requests, fleet, policy, gate=gate, roles=roles).run()
    for rule in (*RULES, replicas) if load.both else RULES:
        fleet = load.fleet()
        yield Simulation(requests, fleet, rule(fleet)).run()
    yield ideal(requests)


def baton_of(variant: str, fleet: Sequence[Worker], client: redis.Redis) -> Baton:
    """Baton's placement in one of its forms."""
    cut_over = {"baton-remote": never, "baton-turns": turns_stay(fleet)}.get(variant, by_costs)
    if variant == "baton-pushed":
        return Baton(fleet, client, name=variant, placed=pushed_prefix(fleet))
    return Baton(fleet, client, name=variant, cut_over=cut_over)


def plan_settings(requests: Sequence[TraceRequest]) -> PlanSettings:
    """The planner is told the simulation's service levels: of the first token that of a mean prompt."""
    mean_ms = sum(map(ttft_slo_ms, requests)) / len(requests)
    return PlanSettings(horizon_s=mean_ms / 1000, step_level_ms=TPOT_SLO_MS)


def results_of(load: Load, outcomes: Sequence[Outcome]) -> Iterator[Result]:
    """All figures of a load; Baton's goodput and hit rate have the best rule's as target and the ideal's as floor."""
    baton, *others, best = outcomes
    rules = [outcome for outcome in others if outcome.policy not in VARIANTS]
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
        if outcome.refused:
            yield Result(name=f"{name}_refused", value=outcome.refused, unit="requests", better="lower")
        if outcome.regrets_ms:
            yield Result(name=f"{name}_regret_mean", value=outcome.mean_regret_ms, unit="ms", better="lower")
            yield Result(name=f"{name}_regret_p99", value=outcome.regret_ms(0.99), unit="ms", better="lower")
        if outcome.place_ms:
            for label, quantile in (("p50", 0.5), ("p99", 0.99)):
                value = percentile(outcome.place_ms, quantile)
                yield Result(name=f"{name}_placement_{label}", value=value, unit="ms", better="lower")


def table_of(load: Load, outcomes: Sequence[Outcome]) -> str:
    """The same for people."""
    runs = len(outcomes[0].runs)
    lines = [
        f"### {load.name}: {runs:,} requests, {runs / outcomes[0].span_s:.1f} a second\n",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" + "|--:" * (len(COLUMNS) - 1) + "|",
    ]
    for outcome in outcomes:
        cells = [
            outcome.policy,
            f"{outcome.good / runs:.1%}",
            number(outcome.goodput),
            f"{outcome.hit_rate:.1%}",
            *(f"{outcome.ttft_ms(quantile):,.0f}" for quantile in (0.5, 0.9, 0.99)),
            *(f"{outcome.tpot_ms(quantile):,.1f}" for quantile in (0.5, 0.99)),
            *(
                f"{value:,.0f}" if outcome.regrets_ms else "–"
                for value in (outcome.mean_regret_ms, outcome.regret_ms(0.99))
            ),
            f"{outcome.imbalance:.2f}",
            f"{outcome.refused}",
            number(percentile(outcome.place_ms, 0.5) if outcome.place_ms else None),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    reasons = ", ".join(f"{reason} {count}" for reason, count in outcomes[0].reasons.most_common())
    moves = "".join(f" {one.policy}: roles moved after {_seconds(one.moves)} s." for one in outcomes if one.moves)
    return "\n".join(lines) + f"\n\nBaton's reasons: {reasons}.{moves}\n"


def _seconds(moments_ms: Sequence[float]) -> str:
    return ", ".join(f"{ms / 1000:.0f}" for ms in moments_ms)


async def run(options: argparse.Namespace, arguments: Sequence[str]) -> ResultsPage:
    """Simulate every load and keep the page up to date."""
    facts = describe("benchmarks.simulate", arguments, torch.device("cpu"), commit=options.commit)
    facts["SLO"] = f"TTFT ≤ {TTFT_SLO_MS:g} ms + {TTFT_SLO_TOKEN_MS:g} ms a prompt token, TPOT ≤ {TPOT_SLO_MS:g} ms"
    page = ResultsPage(options.out, "simulate", title="Placement, simulated", facts=facts)
    loads = [load for load in all_loads(options.traces) if not options.load or load.name in options.load]
    with tempfile.TemporaryDirectory(prefix="baton-simulate-") as data:
        async with run_redis(data_dir=Path(data)) as server:
            client = redis.Redis.from_url(server.url, protocol=2)
            page.state("server", f"{client.info()['redis_version']} (as Redis)")
            tables = []
            is_whole = not options.load
            notes = [notes_of("simulate")] if options.traces and is_whole else []
            for load in loads:
                began = time.monotonic()
                outcomes = list(simulate(load, client, options.traces))
                tables.append(table_of(load, outcomes))
                page.notes = "\n".join(["## Loads\n", *tables, *notes])
                page.add(*results_of(load, outcomes))
                print(f"{tables[-1]}({time.monotonic() - began:.1f} s)\n", flush=True)
            if is_whole:
                page.add(*placement_times(client, SIZES if options.traces else SIZES[:1]))
            client.close()
    return page


def all_loads(traces: Path | None) -> list[Load]:
    return LOADS if traces else MADE_UP


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for simulate.json and simulate.md")
    parser.add_argument("--traces", type=Path, help="folder with conversation_trace.jsonl and synthetic_trace.jsonl")
    parser.add_argument("--commit", default="", help="what the page names when the repository has no history here")
    parser.add_argument("--load", action="append", help="only the load of this name; may be given again")
    options = parser.parse_args(arguments)
    names = [load.name for load in all_loads(options.traces)]
    if unknown := set(options.load or ()) - set(names):
        parser.error(f"--load {', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    asyncio.run(run(options, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
