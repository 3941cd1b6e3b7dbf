"""`make chaos`: every scenario in its long form, a table, and benchmarks/results/chaos.{json,md}.

`python -m tests.chaos kills links …` runs some of them (`--help` names all); `--seconds` is the soak's length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal

import torch

from benchmarks.environment import describe
from benchmarks.results_format import Result, ResultsPage, read_results
from tests.chaos import checks, hosts
from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.crowd import crowd
from tests.chaos.holdings import Holdings
from tests.chaos.kills import Fault, Verdict, crash, freeze, under_load
from tests.chaos.links import Harm, LinkedCluster, Part
from tests.chaos.load import Load
from tests.chaos.overload import CAPACITY, SLOW, Overload, deaf_clients, hung_up, offer
from tests.chaos.poison import FAULTS, KILLS, KILLS_DECODING, Supervisor, poisoned, send
from tests.chaos.power import LINES, can_mount, cut_power
from tests.chaos.real_model import DEMO, REAL, disturbed, undisturbed
from tests.chaos.soak import Soaked, fill, soak
from tests.chaos.trouble import FAULTY, device_trouble, moved, outlives_its_workers, rolling_restart
from tests.chaos.upgrade import LAST, HistoryIsMissingError, UpgradeCluster, check_out, roll
from tests.models import build_tiny_model

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
STREAMS = 50
RESUMED_WITHIN_S = 2.0
POWER_CUTS = 20
POISONINGS = 20
CROWD, MOST_OPEN = 1000, 64
ENGINE_BLOCKS = 4096  # more than the pools of its workers have
LOADS, LOADED_S, FLOODED_S = (0.5, 0.8, 1.0, 1.2), 20.0, 60.0
DEAF, GROWS_MB = 8, 64
FLAT_AFTER_S = 1500.0  # a soak of this length must be flat; what has a bound was filled before it
HARMS: tuple[Harm, ...] = ("cut", "hold")
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")

WORKERS = (
    crash("decode"),
    crash("prefill"),
    freeze("decode", 2),
    freeze("decode", 6),
    freeze("decode", 17),
    freeze("prefill", 6),
)
SERVERS = (crash("nats"), freeze("nats", 3), freeze("nats", 12), crash("redis"), freeze("redis", 6))
GATEWAY = (crash("gateway"), freeze("gateway", 3), freeze("gateway", 8))
WORKER_LINKS = [
    Part(role, server, harm, seconds)
    for role in ("decode", "prefill")
    for server in ("nats", "redis")
    for harm in HARMS
    for seconds in (1, 5, 12)  # without the bus, a worker drops all it has after 3 s
]
GATEWAY_LINKS = [
    Part("gateway", server, harm, seconds) for server in ("nats", "redis") for harm in HARMS for seconds in (1, 5)
]

Scenario = Callable[["Run"], Awaitable[None]]


class Run:
    """One run: where it works, what it found."""

    def __init__(self, folder: Path, page: ResultsPage, *, soak_s: float, soak_rate: float, only: str = "") -> None:
        self.folder = folder
        self.page = page
        self.soak_s, self.soak_rate = soak_s, soak_rate
        self.model = build_tiny_model(folder / "model" / "tiny", "llama")
        self.oracle = Oracle(self.model)
        self.only = only  # of the links: those with this in their name
        self.failures: list[str] = []
        self._clusters = 0

    @contextlib.asynccontextmanager
    async def cluster(self, kind: type[ChaosCluster] = ChaosCluster, **options: object) -> AsyncIterator[ChaosCluster]:
        """Two of each worker, on the fake device."""
        self._clusters += 1
        settings = {"prefill": 2, "decode": 2, "model": self.model, **FAKE, "fake_step_ms": 30, **options}
        async with kind(self.folder / str(self._clusters), **settings) as cluster:  # type: ignore[arg-type]
            yield cluster

    def count(self, name: str, found: list[str], *, target: float | None = 0) -> None:
        """Add a number of violations; their first lines go to the page as well."""
        self.add(Result(name=name, value=len(found), unit="violations", better="lower", target=target))
        self.failures += [f"{name}: {line}" for line in found] if target is not None else []
        self.page.remarks += [f"{name}: {line[:200]}" for line in found[:3]] if target is not None else []

    def add(self, result: Result) -> None:
        """Add a figure and print it."""
        self.page.add(result)
        verdict = {None: "", True: "met", False: "MISSED"}[result.met]
        print(f"{result.name:70} {result.value:10.3f} {result.unit:12} {verdict}", flush=True)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        better: Literal["lower", "higher"] = "lower",
        target: float | None = None,
    ) -> None:
        """Add a figure."""
        self.add(Result(name=name, value=value, unit=unit, better=better, target=target))

    def judged(self, verdict: Verdict, *, errors: bool = False, broken: bool = False, resumed: bool = False) -> None:
        """Add a verdict's figures. `errors`, `broken`: explicit errors and cut connections are the fault's nature."""
        fault = verdict.fault
        self.figure(f"{fault}: requests", verdict.requests, "requests", better="higher")
        self.count(f"{fault}: wrong, repeated or missing tokens", verdict.wrong)
        self.count(f"{fault}: neither an answer nor an error in time", verdict.unanswered)
        self.count(f"{fault}: held 5 s after the load", verdict.held)
        self.count(f"{fault}: connections cut", verdict.broken, target=None if broken else 0)
        told = [f"{code}: {count}" for code, count in verdict.errors.items()]
        target = None if errors else 0
        self.figure(f"{fault}: explicit errors", verdict.errors.total(), "requests", target=target)
        self.page.remarks += [f"{fault}: errors {', '.join(told)}"] if told else []
        target = RESUMED_WITHIN_S if resumed else None
        self.figure(f"{fault}: longest silence of a stream that went on", verdict.silence_s, "s", target=target)


async def kills(run: Run) -> None:
    """Each process and server killed and stopped under load."""
    async with run.cluster() as cluster:
        for number, fault in enumerate((*WORKERS, *SERVERS, *GATEWAY), start=1):
            await _kill(run, cluster, fault, number)
    for crash_host in hosts.FAULTS:
        run.judged(await hosts.under_load(run.folder / crash_host.__name__, run.model, run.oracle, crash_host))


async def _kill(run: Run, cluster: ChaosCluster, fault: Fault, number: int) -> None:
    verdict = await under_load(cluster, run.oracle, fault, streams=STREAMS, first=10_000 * number)
    run.judged(
        verdict,
        errors=fault in SERVERS or fault in GATEWAY,
        broken=fault is GATEWAY[0],
        resumed=fault in WORKERS[:1],
    )


async def real(run: Run) -> None:
    """Workers of the demo model killed while all kinds of sampling, penalties, stop strings and choices are under way."""
    async with run.cluster(model=DEMO, fake=False, **REAL) as cluster:
        asked, expected = await undisturbed(cluster)
        for number, role in enumerate(("decode", "decode", "decode", "prefill"), start=1):
            name = ""

            async def kill(role: str = role) -> None:
                nonlocal name
                name = await cluster.busiest(role) if role == "decode" else "prefill-0"
                await cluster.crash(name)

            found = await disturbed(cluster, asked, expected, kill)
            if name:
                await cluster.again(name)
            kind = f"demo model, kill {number}, -9 {role}"
            run.figure(f"{kind}: requests that moved", found.moved, "requests", better="higher")
            run.count(f"{kind}: other tokens or text than undisturbed", found.different)
            run.count(f"{kind}: neither an answer nor an error in time", found.unanswered)
            run.count(f"{kind}: connections cut", found.broken)
            run.figure(f"{kind}: explicit errors", sum(found.errors.values()), "requests", target=0)
            run.figure(f"{kind}: longest silence of a stream that went on", found.silence_s, "s")


async def links(run: Run) -> None:
    """Each process's link to NATS and to Redis cut, or holding its bytes, under load."""
    async with run.cluster(LinkedCluster) as cluster:
        for number, fault in enumerate((*WORKER_LINKS, *GATEWAY_LINKS), start=1):
            if run.only not in str(fault):
                continue
            verdict = await under_load(cluster, run.oracle, fault, streams=STREAMS, first=500_000 + 10_000 * number)
            run.judged(verdict, errors=fault in GATEWAY_LINKS)


async def poison(run: Run) -> None:
    """Requests that kill what computes them."""
    async with run.cluster(fake_faults=dict.fromkeys(NAMES, FAULTS), fake_step_ms=20) as cluster:
        for name, token in (("prompt", KILLS), ("decoding", KILLS_DECODING)):
            async with Supervisor(cluster) as supervisor:
                outcome = await send(cluster, poisoned(1, run.oracle, token))
                await cluster.until_ready()
            told = (
                [] if outcome.error == "request_quarantined" else [f"{outcome.status} {outcome.error} {outcome.broken}"]
            )
            run.count(f"poison ({name}): not told that it is given up", told)
            run.figure(f"poison ({name}): workers killed", len(supervisor.deaths), "workers", target=2)
            await _poison_among_many(run, cluster, name, token)


async def _poison_among_many(run: Run, cluster: ChaosCluster, name: str, token: int) -> None:
    """Again and again while others are served: which worker died is no secret, of whom is."""
    worst, told, outcomes, held = 0, [], [], []
    for number in range(POISONINGS):
        async with (
            Supervisor(cluster) as supervisor,
            Load(cluster.url, run.oracle, streams=STREAMS, first=100_000 * token + 2_000 * number) as load,
        ):
            await load.until_answered(STREAMS // 2)
            outcome = await send(cluster, poisoned(number + 2, run.oracle, token))
            await cluster.until_ready()
            outcomes += await load.stop()
        worst = max(worst, len(supervisor.deaths))
        if outcome.error != "request_quarantined":
            told.append(f"{outcome.status} {outcome.error} {outcome.broken}")
        held += await cluster.until_idle()
    among = f"poison ({name}) among {STREAMS} streams, {POISONINGS} times"
    run.figure(f"{among}: most workers killed by one", worst, "workers", target=2)
    run.count(f"{among}: not told that it is given up", told)
    run.count(
        f"{among}: others given up", [str(one.ask.number) for one in outcomes if one.error == "request_quarantined"]
    )
    run.count(f"{among}: wrong, repeated or missing tokens", checks.wrong(outcomes, run.oracle.answer))
    run.count(f"{among}: neither an answer nor an error in time", checks.unanswered(outcomes))
    run.count(f"{among}: held 5 s after the load", held)


async def trouble(run: Run) -> None:
    """Devices that break, one worker at a time; then every process restarted in turn, and a stream that sees many workers go."""
    faulty = dict.fromkeys(("prefill-0", "decode-0"), FAULTY)
    options = {"fake_faults": faulty, "fake_step_ms": 20, "step_timeout_s": 2}
    async with run.cluster(gateways=2, gateway_options=("--drain-s", "30"), drain_s=1, **options) as cluster:
        for number, kind in enumerate(("hang", "fail", "oom", "hang-decoding", "fail-decoding"), start=1):
            run.judged(await device_trouble(cluster, run.oracle, kind, streams=20, first=200_000 + 10_000 * number))
        names = [*NAMES, *cluster.gateways]
        run.judged(await rolling_restart(cluster, run.oracle, names, streams=30, first=300_000, longest_answer=200))
        run.figure("rolling restart: moved past the grace", moved(cluster), "requests", better="higher", target=1)
        run.judged(await outlives_its_workers(cluster, run.oracle, first=30_000))


async def upgrade(run: Run) -> None:
    """Every process of the last release replaced by this one's in turn, and back: each kind beside each other kind of both."""
    try:
        code = check_out(LAST, run.folder / "releases")
    except HistoryIsMissingError as error:
        run.page.remarks.append(f"upgrade: left out, {error}")
        return
    async with run.cluster(UpgradeCluster, code=code) as cluster:
        assert isinstance(cluster, UpgradeCluster)
        for old, change in ((False, f"upgrade from {LAST.name}"), (True, f"back to {LAST.name}")):
            names, first = [*cluster.gateways, *NAMES], 700_000 + 50_000 * old
            verdict = await roll(cluster, run.oracle, names, old=old, streams=STREAMS, first=first)
            verdict.fault = f"{change} ({LAST.commit})"
            run.judged(verdict, errors=True)
            # A gateway that leaves tells those who wait: 503.
            others = [error for error in verdict.errors if error != "503 unavailable"]
            run.count(f"{verdict.fault}: errors other than 503", others)


async def overload(run: Run) -> None:
    """The best goodput over a few loads, then ten times what can be served, for a minute, with clients that don't read."""
    async with run.cluster(prefill=1, decode=1, **SLOW) as cluster:
        loads = [
            await offer(cluster, run.oracle, rate=times * CAPACITY, seconds=LOADED_S, first=10_000 * number)
            for number, times in enumerate(LOADS)
        ]
        for times, load in zip(LOADS, loads, strict=True):
            name = f"overload: goodput at {times:g} x the capacity"
            run.figure(name, load.goodput, "answers/s", better="higher")
        calm = loads[0]
        with deaf_clients(cluster.url, DEAF, max_tokens=900) as deaf:
            flood = await offer(cluster, run.oracle, rate=10 * CAPACITY, seconds=FLOODED_S, first=100_000)
            dropped = hung_up(deaf)
        _overloaded(run, loads, flood)
        run.figure(
            f"overload: of {DEAF} clients that don't read, cut off", dropped, "clients", better="higher", target=DEAF
        )
        for name, peak in flood.memory_mb.items():
            grown = max(0.0, peak - calm.memory_mb[name])
            run.figure(f"overload: memory of {name} more than when calm", grown, "MiB", target=GROWS_MB)
        run.count("overload: held 5 s after the load", await cluster.until_idle())


def _overloaded(run: Run, loads: list[Overload], flood: Overload) -> None:
    """What ten times the capacity led to."""
    run.count("overload: wrong, broken or unanswered", [line for load in (*loads, flood) for line in load.wrong])
    share = flood.goodput / max(0.01, *(load.goodput for load in loads))
    run.figure("overload: goodput against the best", share, "share", better="higher", target=0.9)
    run.figure("overload: refused", len(flood.refused), "requests", better="higher")
    run.figure("overload: of them after waiting", flood.refused_late, "requests")
    run.figure("overload: refusal p99, as a light client sees it", 1000 * flood.refusal_p99_s, "ms", target=20)
    run.figure("overload: refusal p99 in the gateway, at most", 1000 * flood.gateway_p99_s, "ms", target=20)
    run.figure("overload: refusals without Retry-After", flood.without_retry_after, "requests", target=0)


async def connections(run: Run) -> None:
    """Far more connections than a gateway keeps open, while it serves."""
    bound = ("--max-connections", str(MOST_OPEN))
    async with run.cluster(gateway_options=bound) as cluster:
        async with Load(cluster.url, run.oracle, streams=20, first=400_000) as load:
            await load.until_answered(20)
            before = len(load.outcomes)
            heard, remaining = await crowd(cluster, CROWD)
            served = load.outcomes[before:]
            outcomes = await load.stop()
        run.figure(
            f"{CROWD} connections, {MOST_OPEN} allowed: let in", heard["let in"], "connections", target=MOST_OPEN
        )
        run.figure(
            "connections: told 503 and when to come back", heard["told"], "connections", better="higher", target=1
        )
        run.figure("connections: cut off beside that", heard["cut off"], "connections")
        run.figure("connections: the gateway's sockets after that", remaining, "sockets", target=MOST_OPEN + 1)
        run.figure(
            "connections: answered meanwhile",
            sum(one.is_whole for one in served),
            "requests",
            better="higher",
            target=1,
        )
        run.count("connections: wrong", checks.wrong(outcomes, run.oracle.answer))
        run.count("connections: unanswered", checks.unanswered(outcomes))


async def power(run: Run) -> None:
    """Power cuts of the broker."""
    if not can_mount():
        run.page.remarks.append("power: left out, it needs root and loop devices")
        return
    found = await cut_power(run.folder / "power", model=run.model, oracle=run.oracle, cuts=POWER_CUTS, always=True)
    run.figure(f"power: lines acknowledged, {POWER_CUTS} cuts as shipped", found.acknowledged, "lines", better="higher")
    run.figure("power: of them without a result", found.lost, "lines", target=0)
    run.figure("power: with more than one result", found.again, "lines", target=0)
    run.figure("power: with a wrong one", found.wrong, "lines", target=0)
    running = sum(0 < done < LINES for done in found.done_before)
    run.figure("power: cuts with a batch half done", running, "cuts", better="higher", target=1)
    found = await cut_power(run.folder / "power-default", model=run.model, oracle=run.oracle, cuts=1, always=False)
    share = found.lost / found.acknowledged
    run.figure("power: lines lost with NATS's default (negative control)", share, "share", better="higher", target=0.01)


async def soaking(run: Run) -> None:
    """Mixed traffic with cancels, on the fake device."""
    async with run.cluster() as cluster:
        if run.soak_s >= FLAT_AFTER_S:
            await fill(cluster)
        soaked = await soak(cluster, run.oracle, rate=run.soak_rate, seconds=run.soak_s, first=1_000_000, tell=_held)
    run.judged(soaked.verdict)
    _add_growth(run, "soak", soaked, soaked.names)


async def soaking_engine(run: Run) -> None:
    """The same with the real engine and a tiny model, for what its workers hold: nobody compares its tokens here."""
    async with run.cluster(prefill=1, decode=1, fake=False, fake_step_ms=0) as cluster:
        if run.soak_s >= FLAT_AFTER_S:
            await fill(cluster, ENGINE_BLOCKS)
        soaked = await soak(
            cluster, run.oracle, rate=run.soak_rate, seconds=run.soak_s, first=2_000_000, is_fake=False, tell=_held
        )
    run.figure("soak, engine: requests", soaked.verdict.requests, "requests", better="higher")
    run.count("soak, engine: neither an answer nor an error in time", soaked.verdict.unanswered)
    run.count("soak, engine: held 5 s after each part of the load", soaked.verdict.held)
    run.figure("soak, engine: explicit errors", soaked.verdict.errors.total(), "requests", target=0)
    _add_growth(run, "soak, engine", soaked, [name for name in soaked.names if "prefill" in name or "decode" in name])


def _held(second: float, held: Holdings) -> None:
    """A line for whoever waits."""
    print(f"{second:6.0f} s " + ", ".join(f"{name} {count:g}" for name, count in held.items()), flush=True)


def _add_growth(run: Run, title: str, soaked: Soaked, names: list[str]) -> None:
    """Slopes have a target once the run is long enough for caches to be full."""
    is_long = run.soak_s >= FLAT_AFTER_S
    run.figure(f"{title}: length", soaked.samples[-1][0], "s", better="higher")
    for name in names:
        unit, seconds = ("MiB/10 min", 600) if name.startswith("memory") else ("count/h", 3600)
        bounded = (
            name.startswith("threads") or name == "messages in BATON_DEAD"
        )  # by pools' sizes; by a number and bytes
        target = 1 if is_long and not bounded else None
        run.figure(f"{title}: {name}, growth", max(0.0, soaked.growth(name, seconds)), unit, target=target)


SCENARIOS: dict[str, Scenario] = {
    "kills": kills, "real": real, "links": links, "poison": poison, "trouble": trouble, "upgrade": upgrade, "overload": overload,
    "connections": connections, "power": power, "soak": soaking, "soak-engine": soaking_engine,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the scenarios; the exit code says whether all targets were met."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", help=f"some of {', '.join(SCENARIOS)}; none: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the soak")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second of the soak")
    parser.add_argument(
        "--only", default="", help="of the links, those with this in their name, such as 'decode - nats'"
    )
    parser.add_argument(
        "--add",
        type=Path,
        action="append",
        default=[],
        help="folder with a chaos.json of another run: take its figures",
    )
    parser.add_argument(
        "--keep", default="", help="keep the figures that are not measured again, and say so with this text"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of chaos.json and chaos.md")
    options = parser.parse_args(arguments)
    unknown = set(options.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}: there are {', '.join(SCENARIOS)}")
    logging.getLogger("baton").setLevel(logging.ERROR)
    facts = describe("tests.chaos", arguments, torch.device("cpu"))
    facts["load average"] = " ".join(f"{load:.1f}" for load in os.getloadavg()) + f" on {os.cpu_count()} cores"
    earlier: list[Result] = []
    for folder in [options.results] * bool(options.keep) + options.add:
        earlier = merged(earlier, read_results(folder / "chaos.json"))
    page = ResultsPage(options.results, "chaos", title="Chaos", facts=facts)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as work:
        run = Run(Path(work), page, soak_s=options.seconds, soak_rate=options.rate, only=options.only)
        for name in options.scenarios or (() if options.add else SCENARIOS):
            asyncio.run(SCENARIOS[name](run))
    if earlier:
        page.results = merged(earlier, page.results)
        page.remarks.append(f"not measured again: {options.keep}")
    page.write()
    for failure in run.failures[:50]:
        print(failure)
    return 0 if all(result.met is not False for result in page.results) else 1


def merged(earlier: list[Result], newer: list[Result]) -> list[Result]:
    """Earlier figures, but none of a fault or scenario (what stands before the colon) that has newer ones; then those."""
    again = {result.name.partition(":")[0] for result in newer}
    return [result for result in earlier if result.name.partition(":")[0] not in again] + newer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
