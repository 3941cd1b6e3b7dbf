"""The cost of a handoff: a prefill and a decode worker beside two that do both, through the gateway's HTTP.

    python -m benchmarks.handoff --out DIR                                          on two H200s, in less than 8 minutes
    python -m benchmarks.handoff --out DIR --device cpu --model demo --quick       the same code; its figures say nothing

Arm `pd`: 1 prefill + 1 decode worker. Arm `both`, the control: the same code and GPUs, two workers that prefill and decode. Each
arm is a whole Baton (`baton up`): real NATS, Redis, gateway and worker processes. Low load is asked for while both are there, a
few requests of one, then of the other. `benchmarks/README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.environment import ROOT, describe
from benchmarks.handoff.breakdown import explain, read_timelines
from benchmarks.handoff.client import Load, Sample, percentile, run_load
from benchmarks.results_format import Result, ResultsPage, notes_of, number
from benchmarks.weights.checkpoint import served_checkpoint

DEFAULT_SHAPE = "llama-3.1-8b"
START_S = 240.0
ARMS = {"pd": (1, 1), "both": (0, 2)}
KV_MEMORY_MB = 40960  # workers of both arms share a GPU; no load needs more


class Cell(NamedTuple):
    """A load of about 50 seconds, with our targets and what vLLM 0.26 reached as 1P+1D (NIXL).

    Figures of shorter loads depend on their bursts more than on the rate.
    """

    prompt: int
    answer: int
    rate: float
    requests: int
    targets: dict[str, tuple[float, float]]  # figure -> target, vLLM 1P+1D; milliseconds

    @property
    def name(self) -> str:
        return f"{self.prompt}_{self.answer}_at_{self.rate:g}"


CELLS = (
    Cell(
        2048,
        128,
        10,
        512,
        {
            "ttft_p50": (60, 126),
            "ttft_p99": (130, 362),
            "tpot_p99": (5.5, 6.3),
            "itl_p99": (8, 12.6),
        },
    ),
    Cell(
        2048,
        128,
        18,
        900,
        {
            "ttft_p50": (90, 257),
            "ttft_p99": (300, 619),
            "tpot_p99": (7, 8.7),
            "itl_p99": (10, 33),
        },
    ),
    Cell(8192, 64, 4, 200, {"ttft_p50": (235, 463), "tpot_p99": (6.5, 7.2)}),
)
QUICK_CELLS = (Cell(48, 8, 10, 30, {}),)
LOW_LOAD = (128, 512, 2048, 8192)
# The arms take turns, because a shared machine's processors are slower for minutes now and then.
LOW_COUNT, LOW_ROUNDS = 8, 6  # requests of a length in a turn; turns
LOW_ANSWER = 8
ALLOWED_EXCESS = 0.05  # over the control arm's TTFT, at low load
MAX_REST_PERCENT = 2.0  # share of the mean TTFT at low load that no part explains


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 when a request failed, else 0. A missed target is no failure."""
    options = _parse(arguments)
    device = torch.device("cpu" if options.device == "cpu" else "cuda:0")
    facts = describe("benchmarks.handoff", arguments, device, commit=options.commit)
    if device.type == "cuda":
        facts["device"] = f"{torch.cuda.device_count()} x {facts['device']}"
    facts["reference"] = (
        "vLLM 0.26.0 as 1 prefill + 1 decode over NIXL, two H200s, Llama-3.1-8B shape, bf16 (MEASUREMENTS.md)"
    )
    notes = "" if options.quick else notes_of("handoff")
    page = ResultsPage(options.out, "handoff", title="The handoff on two devices", facts=facts, notes=notes)
    run = Run(options, page)
    run.measure(options.arms.split(","))
    run.compare()
    page.state("duration", f"{run.elapsed():.0f} s")
    page.write()
    return 1 if page.remarks else 0


class Server(NamedTuple):
    """An arm that serves."""

    arm: str
    host: str
    port: int
    model: str


class Run:
    """One run of all arms, results written as they come."""

    def __init__(self, options: argparse.Namespace, page: ResultsPage) -> None:
        self._options, self._page = options, page
        self._began = time.monotonic()
        self._low: dict[tuple[str, int], float] = {}  # (arm, prompt) -> median TTFT in ms
        self._model = options.model or served_checkpoint(options.checkpoints, DEFAULT_SHAPE)
        self._vocab_size = int(json.loads((self._model / "config.json").read_text())["vocab_size"])
        self._say(f"model {self._model}")

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def measure(self, arms: Sequence[str]) -> None:
        """Measure the first arm's cells, then low load with all arms up, then the other arms' cells."""
        with ExitStack() as others, ExitStack() as first:
            servers = [self._start(arms[0], self._options.port, first)]
            self._measure_cells(servers[0])
            servers += [self._start(arm, self._options.port + at, others) for at, arm in enumerate(arms[1:], 1)]
            self._measure_low_load(servers)
            first.close()
            for server in servers[1:]:
                self._measure_cells(server)

    def _start(self, arm: str, port: int, until: ExitStack) -> Server:
        """Start an arm and have it compute prompts of every length that it will be asked for."""
        options = self._options
        server = until.enter_context(_serving(options, self._model, arm=arm, port=port))
        self._say(f"{arm}: ready")
        for prompt, rate in ((512, 0.0), (100 if options.quick else max(LOW_LOAD), 0.0), (512, 8.0)):
            self._load(server, prompt=prompt, answer=16, rate=rate, count=12, name=f"warm {prompt} {rate}")
        return server

    def _measure_cells(self, server: Server) -> None:
        for cell in QUICK_CELLS if self._options.quick else CELLS:
            self._cell(server, cell)

    def _measure_low_load(self, servers: Sequence[Server]) -> None:
        """Send one request after the other: a few of one length to one arm, then to the next one."""
        lengths = (32, 100) if self._options.quick else LOW_LOAD
        asked: dict[str, dict[int, list[Sample]]] = {
            server.arm: {prompt: [] for prompt in lengths} for server in servers
        }
        for turn in range(2 if self._options.quick else LOW_ROUNDS):
            for prompt in lengths:
                for server in servers if turn % 2 else reversed(servers):
                    asked[server.arm][prompt] += self._load(
                        server, prompt=prompt, answer=LOW_ANSWER, rate=0.0, count=LOW_COUNT, name=f"low {prompt} {turn}"
                    )
        for server in servers:
            self._low_load(server.arm, asked[server.arm], read_timelines(server.host, server.port))

    def _low_load(self, arm: str, low: Mapping[int, list[Sample]], lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the medians by prompt length, and the parts that they consist of."""
        for prompt, samples in low.items():
            if not samples:
                continue
            self._low[arm, prompt] = 1000 * statistics.median(sample.ttft for sample in samples)
            self._add(f"{arm}_low_{prompt}_ttft_p50", self._low[arm, prompt])
            unexplained = self._explain(f"{arm}_low_{prompt}", samples, lines)
            self._page.add(
                Result(
                    name=f"{arm}_low_{prompt}_rest",
                    value=100 * unexplained,
                    unit="% of the mean TTFT",
                    better="lower",
                    target=MAX_REST_PERCENT,
                )
            )

    def _cell(self, server: Server, cell: Cell) -> None:
        samples = self._load(
            server, prompt=cell.prompt, answer=cell.answer, rate=cell.rate, count=cell.requests, name=cell.name
        )
        if not samples:
            return
        arm = server.arm
        for figure, value in _figures(samples).items():
            target, reference = cell.targets.get(figure, (None, None)) if arm == "pd" else (None, None)
            self._add(f"{arm}_{cell.name}_{figure}", value, target=target, reference=reference)
        self._explain(f"{arm}_{cell.name}", samples, read_timelines(server.host, server.port))

    def _explain(self, name: str, samples: list[Sample], lines: Mapping[str, Mapping[str, Any]]) -> float:
        """Add the means of the TTFT's parts over these requests; return the share that they leave unexplained."""
        found = explain(samples, lines)
        parts = found.parts
        self._say(f"{name}: {found}, {found.count} of {len(samples)} requests")
        if parts.get("push"):
            hidden = 1 - parts.get("late_push", 0.0) / parts["push"]
            self._say(
                f"{name}: pushes {parts['push']:.2f} ms, {hidden:.0%} hidden behind the prefill; the decode worker had the "
                f"sequence {parts.get('handover', 0.0):.2f} ms after its first token"
            )
        placed = Counter(lines[sample.answer]["placement"] for sample in samples if sample.answer in lines)
        self._say(f"{name}: placed " + ", ".join(f"{reason} {count}" for reason, count in placed.items()))
        for part, value in parts.items():
            self._add(f"{name}_mean_{part}", value, quiet=True)
        self._add(f"{name}_mean_rest", found.rest, quiet=True)
        return found.unexplained

    def compare(self) -> None:
        """Add the ratio of both arms' TTFT at low load; at most 5 % more is the aim."""
        for (arm, prompt), value in self._low.items():
            control = self._low.get(("both", prompt))
            if arm == "pd" and control:
                self._page.add(
                    Result(
                        name=f"low_{prompt}_pd_over_both",
                        value=100 * value / control,
                        unit="% of the control arm's TTFT",
                        better="lower",
                        target=100 * (1 + ALLOWED_EXCESS),
                    )
                )
                self._say(f"prompt {prompt}: TTFT {value:.1f} ms, control {control:.1f} ms ({value / control:.1%})")

    def _load(self, server: Server, *, prompt: int, answer: int, rate: float, count: int, name: str) -> list[Sample]:
        """Send a load; return the samples without error, errors become a remark.

        Prompts depend on `name`, so that none is in the cache from another load.
        """
        load = Load(
            prompt=prompt, answer=answer, rate=rate, count=count, vocab_size=self._vocab_size, seed=hash_of(name)
        )
        samples = asyncio.run(run_load(server.host, server.port, server.model, load))
        failed = [sample for sample in samples if sample.error]
        if failed:
            remark = f"{len(failed)} of {len(samples)} requests failed at {load}: {failed[0].error}"
            self._say(remark)
            self._page.remarks.append(remark)
            self._page.write()
        return [sample for sample in samples if not sample.error]

    def _add(
        self,
        name: str,
        value: float,
        *,
        target: float | None = None,
        reference: float | None = None,
        quiet: bool = False,
    ) -> None:
        result = Result(name=name, value=value, unit="ms", better="lower", target=target, reference=reference)
        self._page.add(result)
        if not quiet:
            met = {None: "", True: ", met", False: ", MISSED"}[result.met]
            self._say(f"{name} {number(value)} ms{met} (target {number(target)}, vLLM 1P+1D {number(reference)})")

    def _say(self, text: str) -> None:
        print(f"[{self.elapsed():6.1f} s] {text}", flush=True)


def hash_of(name: str) -> int:
    """Return the seed for a load's name: loads with different names share no prompt, so no prefix is cached."""
    return zlib.crc32(name.encode())


def _figures(samples: list[Sample]) -> dict[str, float]:
    ttft, tpot = [sample.ttft for sample in samples], [sample.tpot for sample in samples]
    gaps = [gap for sample in samples for gap in sample.gaps]
    figures = {
        "ttft_p50": percentile(ttft, 0.5),
        "ttft_p90": percentile(ttft, 0.9),
        "ttft_p99": percentile(ttft, 0.99),
        "tpot_p50": percentile(tpot, 0.5),
        "tpot_p99": percentile(tpot, 0.99),
        "itl_p50": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
    }
    return {name: 1000 * value for name, value in figures.items()}


@contextmanager
def _serving(options: argparse.Namespace, model: Path, *, arm: str, port: int) -> Iterator[Server]:
    """A whole Baton as `baton up` starts it, until the block ends."""
    prefill, decode = ARMS[arm]
    with tempfile.TemporaryDirectory(prefix="baton-handoff-") as data:
        command = [sys.executable, "-m", "services.up", "--model", str(model), "--port", str(port)]
        command += ["--device", options.device, "--prefill", str(prefill), "--decode", str(decode), "--data-dir", data]
        command += [] if options.device == "cpu" else ["--kv-memory-mb", str(KV_MEMORY_MB)]
        command += options.up.split()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            _wait_until_ready(process)
            yield Server(arm, "127.0.0.1", port, model.resolve().name)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            for log in Path(data, "logs").glob("*.log"):
                (options.out / f"{arm}_{log.name}").write_text(log.read_text(errors="replace")[-200_000:])


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    give_up_at = time.monotonic() + START_S
    for line in process.stdout:
        print(f"    {line.rstrip()}", flush=True)
        if line.startswith("Baton serves"):
            return
        if time.monotonic() > give_up_at:
            break
    raise SystemExit("baton up did not get ready; its output is above")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for handoff.json, handoff.md and the services' logs"
    )
    parser.add_argument("--device", default="cuda:0,cuda:1", help="as `baton up` takes it")
    parser.add_argument("--model", type=Path, help="a checkpoint; default: random weights of Llama-3.1-8B's shape")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("/tmp/baton-checkpoints"), help="where those are written"
    )
    parser.add_argument("--arms", default="pd,both", help="pd, both, or one of them")
    parser.add_argument("--port", type=int, default=8765, help="of the first arm; the other's is the next one")
    parser.add_argument("--up", default="", help="further options of `baton up`, in one string")
    parser.add_argument("--quick", action="store_true", help="small, for a CPU")
    parser.add_argument("--commit", default="", help="what the page names when the repository has no history here")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
