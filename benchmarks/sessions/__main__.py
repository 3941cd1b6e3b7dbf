"""Sessions of agents whose KV is several times the pool: what is found again with and without a host tier.

    python -m benchmarks.sessions --out DIR                                       demo model on a CPU, in minutes
    python -m benchmarks.sessions --out DIR --device cuda --model F --agents 32 --context 32000 --turns 12

Each arm is a whole Baton with one worker (`baton up`): real NATS, Redis, gateway. All arms play the same sessions, with a pool
for a third of their KV; the arm `host` has a tier for twice all of it, `files` host memory for a third and files for twice all
of it, in `--out`. `benchmarks/sessions/trace.py` has the sessions' shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.environment import ROOT, describe
from benchmarks.results_format import Result, ResultsPage, notes_of
from benchmarks.sessions.agents import Asked, play
from benchmarks.sessions.baton import running, token_bytes
from benchmarks.sessions.costs import Costs, measure
from benchmarks.sessions.trace import CONTEXT, TURNS, longest_prompt, sessions

ARMS = ("pool", "host")
POOL_SHARE = 1 / 3  # of the working set
HOST_TIMES = 2.0
HOST_ABOVE_FILES = 1 / 3
FOUND_TARGET = 90.0  # % of reusable tokens, with the tier
TTFT_TARGET = 10.0  # % of the first token's median without it
HIT_TARGET = 45.0  # ms, 8,000 tokens from host memory and 256 computed, Llama-3.1-8B's shape on one H200
STORING_TARGET = 101.0  # % of the time a token without it


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 when a request failed, else 0. A missed target is no failure."""
    options = _parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    facts = describe("benchmarks.sessions", given, torch.device("cpu" if options.device == "cpu" else "cuda:0"))
    config = json.loads((options.model / "config.json").read_text())
    played = sessions(
        options.agents,
        turns=options.turns,
        context=options.context,
        pause_s=options.pause_s,
        vocab_size=int(config["vocab_size"]),
    )
    working_set_mb = options.agents * longest_prompt(played[0]) * token_bytes(options.model, options.device) / (1 << 20)
    pool_mb = options.kv_memory_mb or max(1, round(POOL_SHARE * working_set_mb))
    facts["sessions"] = (
        f"{options.agents} agents, {options.turns} turns, {options.context} tokens a prompt (recorded: {TURNS}, {CONTEXT}), "
        f"{options.pause_s:g} s between turns; {working_set_mb:.0f} MiB of KV, a pool of {pool_mb}"
    )
    page = ResultsPage(
        options.out, options.name, title="Agents' sessions", facts=facts, notes=notes_of(options.name, options.out)
    )
    medians = dict[str, float]()
    costs = dict[str, Costs]()
    pool_tokens = round(pool_mb * (1 << 20) / token_bytes(options.model, options.device))
    for arm in options.arms.split(","):
        with _serving(options, arm, pool_mb=pool_mb, working_set_mb=working_set_mb) as url:
            began_at = time.monotonic()
            asked = asyncio.run(play(url, options.model.resolve().name, played))
            _report(page, arm, asked, time.monotonic() - began_at)
            medians[arm] = statistics.median(each.ttft_s for each in asked if each.turn)
            if options.hit_tokens:
                costs[arm] = asyncio.run(
                    measure(
                        url,
                        options.model.resolve().name,
                        tokens=options.hit_tokens,
                        pool_tokens=pool_tokens,
                        vocab_size=int(config["vocab_size"]),
                    )
                )
                _report_costs(page, arm, costs)
    if medians.get("pool") and "host" in medians:
        value = 100 * medians["host"] / medians["pool"]
        page.add(_percent("host_over_pool_ttft_p50", value, "% of the pool's", target=TTFT_TARGET, better="lower"))
    return 1 if page.remarks else 0


def _report(page: ResultsPage, arm: str, asked: Sequence[Asked], seconds: float) -> None:
    failed = [each for each in asked if each.error]
    if failed:
        page.remarks.append(f"{arm}: {len(failed)} of {len(asked)} requests failed: {failed[0].error}")
    done = [each for each in asked if not each.error]
    reusable = sum(each.reusable for each in done)
    found = 100 * sum(min(each.cached, each.reusable) for each in done) / max(1, reusable)
    ttft = [1000 * each.ttft_s for each in done if each.turn]
    page.add(
        _percent(f"{arm}_found", found, "% of reusable tokens", target=None if arm == "pool" else FOUND_TARGET),
        Result(name=f"{arm}_ttft_p50", value=statistics.median(ttft), unit="ms", better="lower"),
        Result(name=f"{arm}_turns_per_s", value=len(done) / seconds, unit="1/s", better="higher"),
    )
    for result in page.results[-3:]:
        print(f"{result.name} {result.value:.4g} {result.unit}", flush=True)


def _report_costs(page: ResultsPage, arm: str, costs: Mapping[str, Costs]) -> None:
    cost = costs[arm]
    target = HIT_TARGET if arm == "host" else None
    page.add(
        Result(name=f"{arm}_again_ttft_p50", value=1000 * cost.ttft_s, unit="ms", better="lower", target=target),
        Result(name=f"{arm}_stored_tpot_p50", value=1000 * cost.tpot_s, unit="ms", better="lower"),
    )
    for result in page.results[-2:]:
        print(f"{result.name} {result.value:.4g} {result.unit}, {cost.cached:.0f} tokens found", flush=True)
    if "pool" in costs and arm == "host":
        value = 100 * cost.tpot_s / costs["pool"].tpot_s
        page.add(_percent("host_over_pool_tpot_p50", value, "% of the pool's", target=STORING_TARGET, better="lower"))


def _percent(name: str, value: float, unit: str, *, target: float | None, better: str = "higher") -> Result:
    return Result(name=name, value=value, unit=unit, better="lower" if better == "lower" else "higher", target=target)


@contextmanager
def _serving(options: argparse.Namespace, arm: str, *, pool_mb: int, working_set_mb: float) -> Iterator[str]:
    """A whole Baton with the tiers of an arm, until the block ends; its address."""
    host_mb = options.kv_host_mb or math.ceil((HOST_ABOVE_FILES if arm == "files" else HOST_TIMES) * working_set_mb)
    up = ["--kv-memory-mb", str(pool_mb), "--kv-host-mb", str(0 if arm == "pool" else host_mb), *options.up.split()]
    with tempfile.TemporaryDirectory(prefix="baton-files-", dir=options.out) as files:
        if arm == "files":
            up += ["--kv-disk", f"{files}:{math.ceil(HOST_TIMES * working_set_mb)}"]
        with running(
            options.model, device=options.device, port=options.port, out=options.out, arm=arm, options=up
        ) as url:
            yield url


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sessions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", type=Path, default=ROOT / "demo", help="folder of a model; default: the demo model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--arms", default=",".join(ARMS), help="of pool, host and files, by comma")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8, help=f"of a session; recorded: {TURNS}")
    parser.add_argument("--context", type=int, default=300, help=f"tokens of the mean prompt; recorded: {CONTEXT}")
    parser.add_argument("--pause-s", type=float, default=0.5, help="mean time of the tool between two turns")
    parser.add_argument("--kv-memory-mb", type=int, default=0, help="the pool; default: a third of the sessions' KV")
    parser.add_argument("--kv-host-mb", type=int, default=0, help="the host tier; default: twice the sessions' KV")
    parser.add_argument(
        "--hit-tokens", type=int, default=0, help="measure a prompt of so many tokens pushed out of the pool, too"
    )
    parser.add_argument("--name", default="sessions", help="of the results page")
    parser.add_argument("--port", type=int, default=8390)
    parser.add_argument("--up", default="", help="further options of `baton up`")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
