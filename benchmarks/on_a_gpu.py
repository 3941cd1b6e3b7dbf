"""All that is measured on one GPU, as steps in order of worth, in parts that fit a machine lent for minutes.

    python -m benchmarks.on_a_gpu --out DIR --part 1/3      of three calls the first
    python -m benchmarks.on_a_gpu --list 3                  which steps are in which part

A step is a process with a time limit. One that fails or is too slow stops no other. After each step DIR has a page that says what
ran and what failed, and an archive of all results and logs: two files, because few come back from a lent machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.environment import ROOT

LIMIT_S = 520.0  # three such calls, their transfers and the machine's start are less than 1,800 s
PARTS = 3
GRACE_S = 5.0  # between asking a slow step to end and ending it
TAIL_LINES = 15
OUT = "{out}"
COMPARED = "^(decode_b(1|8|32|64|128|256)_ctx1088|ttft_p(512|2048|8192)|prefill_1024)$"
FEW = "^(decode_b(1|16)_ctx1088)$"
DECODED = "^(decode_b(1|32|64|256)_ctx1088|decode_b32_ctx8256)$"


@dataclass(frozen=True, slots=True)
class Step:
    """A command behind `python -m`; `OUT` in it becomes the folder of the results."""

    name: str
    command: tuple[str, ...]
    estimate_s: float  # from earlier pages' durations where there are some

    @property
    def limit_s(self) -> float:
        return 1.5 * self.estimate_s

    def of(self, commit: str) -> Step:
        """The same, whose page names the commit."""
        if not commit or self.command[0] != "benchmarks.engine":
            return self
        return replace(self, command=(*self.command, "--commit", commit))


def engine(name: str, estimate_s: float, *options: str, cells: str = COMPARED) -> Step:
    return Step(name, ("benchmarks.engine", "--out", OUT, "--cells", cells, *options), estimate_s)


def tests(name: str, estimate_s: float, *options: str) -> Step:
    # The benchmarks' plugin, where it is installed, warns beside xdist, and warnings are errors.
    return Step(
        name,
        ("pytest", "-q", "-rfE", "-p", "no:benchmark", "-p", "no:cacheprovider", *options, "tests/gpu"),
        estimate_s,
    )


STEPS = (
    tests("tests", 200, "-n", "4", "--dist", "worksteal", "-k", "not far_checks and not ucx"),
    tests("tests-far", 120, "-k", "far_checks"),  # each takes most of the card's memory
    engine("llama-8b", 120, cells="^(?!kernels|accuracy)"),
    engine("llama-8b-fp8", 60, "--quantization", "fp8"),
    engine("qwen3.5-35b-a3b", 70, "--shape", "qwen3.5-35b-a3b"),
    engine("qwen3-30b-a3b", 50, "--shape", "qwen3-30b-a3b"),
    engine("llama-8b-fp8-kv-fp8", 60, "--quantization", "fp8", "--kv-cache-dtype", "fp8"),
    engine("llama-8b-kv-int8", 40, "--kv-cache-dtype", "int8", cells=DECODED),
    engine("llama-8b-kv-int4", 40, "--kv-cache-dtype", "int4", cells=DECODED),
    Step("accuracy", ("benchmarks.quality.accuracy",), 120),
    engine("glm-4.7-flash", 70, "--shape", "glm-4.7-flash"),
    engine("llama-70b-fp8", 100, "--shape", "llama-3.1-70b", "--quantization", "fp8"),
    engine("llama-8b-int4", 40, "--quantization", "int4", cells=FEW),
    engine("gpt-oss-20b", 40, "--shape", "gpt-oss-20b"),
    engine("gemma-3-12b", 60, "--shape", "gemma-3-12b"),
    engine("qwen3.5-9b", 60, "--shape", "qwen3.5-9b"),
    Step("kernels-quantised", ("benchmarks.kernels", "--quantised"), 90),
    Step("kernels", ("benchmarks.kernels",), 60),
    Step("kernels-errors", ("benchmarks.kernels", "--errors"), 60),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a step."""

    step: Step
    state: str
    seconds: float = 0.0
    last_lines: str = ""


def parts_of(steps: Iterable[Step], count: int, limit_s: float) -> list[list[Step]]:
    """Give each step to the first part with room for its estimate; what no part has room for comes last in the last one."""
    parts: list[list[Step]] = [[] for _ in range(count)]
    room = [limit_s] * count
    for step in steps:
        part = next((at for at in range(count) if step.estimate_s <= room[at]), count - 1)
        parts[part].append(step)
        room[part] -= step.estimate_s
    return parts


class Run:
    """Steps one after the other, until the time is over."""

    def __init__(self, out: Path, name: str, *, limit_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._page, self._archive = out / f"{name}.md", out / f"{name}.tar.gz"
        self._ends = time.monotonic() + limit_s
        self._outcomes: list[Outcome] = []

    def all(self, steps: Sequence[Step]) -> list[Outcome]:
        """Run what there is time for. A step that would not end in time makes way for a shorter one."""
        with tempfile.TemporaryDirectory(prefix="on-a-gpu-") as folder:
            self._steps(steps, Path(folder))
        return self._outcomes

    def _steps(self, steps: Sequence[Step], results: Path) -> None:
        for step in steps:
            left = self._ends - time.monotonic()
            if left < step.estimate_s:
                self._outcomes.append(Outcome(step, "left out, no time"))
            else:
                self._outcomes.append(run_step(step, results, limit_s=min(step.limit_s, left)))
            print(_line(self._outcomes[-1]), flush=True)
            self._keep(results)

    def _keep(self, results: Path) -> None:
        self._page.write_text(page(self._outcomes))
        archive = self._archive.with_suffix(".new")
        with tarfile.open(archive, "w:gz") as opened:
            opened.add(results, arcname=".")
        archive.replace(self._archive)


def run_step(step: Step, results: Path, *, limit_s: float) -> Outcome:
    """Run one step; its output goes to a log beside its results. What it started in its process group ends with it."""
    log, started = results / f"{step.name}.log", time.monotonic()
    command = [sys.executable, "-m", *(word.replace(OUT, str(results)) for word in step.command)]
    with log.open("wb") as opened:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=opened,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            state = "done" if code == 0 else f"failed, exit code {code}"
        except subprocess.TimeoutExpired:
            state = f"ended after {limit_s:.0f} s"
        finally:
            _end(process)
    lines = log.read_text(errors="replace").splitlines()
    return Outcome(step, state, time.monotonic() - started, "\n".join(lines[-TAIL_LINES:]))


def page(outcomes: Iterable[Outcome]) -> str:
    """The page: steps that ran, failed (with their last lines), or were left out."""
    outcomes = list(outcomes)
    rows = "".join(
        f"| {each.step.name} | {each.state} | {each.seconds:.0f} | {each.step.estimate_s:.0f} |\n" for each in outcomes
    )
    text = f"| step | state | seconds | estimate |\n|---|---|--:|--:|\n{rows}"
    for each in outcomes:
        if each.last_lines:
            text += f"\n{each.step.name}: `python -m {shlex.join(each.step.command)}`\n\n```\n{each.last_lines}\n```\n"
    return text


def _line(outcome: Outcome) -> str:
    text = f"{outcome.step.name}: {outcome.state}, {outcome.seconds:.0f} s"
    return text if outcome.state == "done" else f"{text}\n{outcome.last_lines}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 1/3")
    return int(found[1]), int(found[2])


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 when a step failed or was left out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the page and the archive")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="all steps together end by then")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="N/M", help="one of so many calls")
    parser.add_argument(
        "--also", default="(?!)", metavar="REGEX", help="and then steps of other parts whose name it finds"
    )
    parser.add_argument("--steps", default="", metavar="REGEX", help="only steps whose name it finds")
    parser.add_argument("--commit", default="", help="what the engine's pages call this version, where there is no git")
    parser.add_argument("--list", type=int, metavar="M", help="print the steps of so many calls, and run none")
    options = parser.parse_args(arguments)
    steps = [step.of(options.commit) for step in STEPS if re.search(options.steps, step.name)]
    if options.list:
        for number, part in enumerate(parts_of(steps, options.list, options.limit_s), 1):
            names = ", ".join(f"{step.name} {step.estimate_s:.0f}" for step in part)
            print(f"{number}: {names}; {sum(step.estimate_s for step in part):.0f} s")
        return 0
    if options.out is None:
        parser.error("--out is missing: the folder for the page and the archive")
    number, count = options.part
    part = parts_of(steps, count, options.limit_s)[number - 1]
    part += [step for step in steps if step not in part and re.search(options.also, step.name)]
    outcomes = Run(options.out, f"part-{number}", limit_s=options.limit_s).all(part)
    print(page(outcomes), flush=True)
    return 0 if all(outcome.state == "done" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
