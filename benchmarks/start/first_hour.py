"""A newcomer's first hour in figures: set-up, start, first answer, a real model's start, each command's, the console's page.

    python -m benchmarks.start.first_hour --out DIR             by this checkout's ./baton
    python -m benchmarks.start.first_hour --out DIR --install   by a `baton` that pip installs into an empty environment first

A command's start is held to its CPU time: on a quiet machine that is its wall time, which stands beside it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from benchmarks.environment import ROOT, describe
from benchmarks.results_format import Result, ResultsPage, notes_of
from benchmarks.up import serving
from services.runtime.commands import COMMANDS
from services.runtime.models.packaged import fetched
from services.runtime.servers import free_port

REFERENCE = "Baton at 905a377, 2026-11-22 11:00 UTC, two cores shared with other work (load 4 to 11)"
BEFORE = {
    "set_up": 97.0,
    "set_up_size": 1300.0,
    "up_ready": 3.95,
    "first_answer": 0.40,
    "first_token": 0.255,
    "stop": 3.7,
    "start_version": 1.7,
    "start_chat_help": 0.6,
    "start_keys_help": 0.8,
    "page": 73.016,
    "page_zipped": 21.485,
}
TARGETS = {"start": 0.3, "up_ready": 10.0, "first_answer": 1.0}  # of a start: what a person doesn't notice
TARGETS |= {"real_first_token": 1.5, "real_gateway_memory": 60.0}
REAL = "smollm2"
REPEATS = 7
READY_S = 120.0
MOST_TOKENS = 100
QUESTION = "What is the capital of France?"


def main(arguments: Sequence[str]) -> int:
    """Return 1 if Baton did not answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--install", action="store_true")
    options = parser.parse_args(arguments)
    facts = describe("benchmarks.start.first_hour", arguments, torch.device("cpu"))
    facts["load"] = (
        ", ".join(f"{load:.1f}" for load in os.getloadavg()) + f" over 1, 5, 15 minutes; {os.cpu_count()} cores"
    )
    facts["reference"] = REFERENCE
    page = ResultsPage(options.out, "first_hour", title="The first hour", facts=facts, notes=notes_of("first_hour"))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        baton = _installed(page, here) if options.install else str(ROOT / "baton")
        _starts(page, baton, here)
        answered = _serving(page, baton, here)
        _real(page, baton, here)
    _console(page)
    return int(not answered)


def _add(page: ResultsPage, name: str, value: float, unit: str = "s", target: float | None = None) -> None:
    page.add(Result(name=name, value=value, unit=unit, better="lower", target=target, reference=BEFORE.get(name)))


def _installed(page: ResultsPage, folder: Path) -> str:
    """Install with everything into an empty environment; the path of its command."""
    began, venv = time.perf_counter(), folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin/pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, f"{ROOT}[all]"], check=True)
    _add(page, "set_up", time.perf_counter() - began)
    size = sum(path.stat().st_size for path in venv.rglob("*") if path.is_file() and not path.is_symlink())
    _add(page, "set_up_size", size / 1e6, "MB")
    return str(venv / "bin/baton")


def _starts(page: ResultsPage, baton: str, folder: Path) -> None:
    """Each command's help, and what needs nothing else."""
    lines = {"help": ["--help"], "version": ["--version"], "completion": ["completion", "bash"]}
    lines |= {f"{name}_help": [name, "--help"] for name in COMMANDS if name != "completion"}
    for name, line in lines.items():
        runs = [_timed([baton, *line], folder) for _ in range(REPEATS)]
        _add(page, f"start_{name}", statistics.median(wall for wall, _ in runs))
        _add(page, f"start_{name}_cpu", statistics.median(cpu for _, cpu in runs), target=TARGETS["start"])


def _timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds. Raises RuntimeError when the command fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


def _serving(page: ResultsPage, baton: str, folder: Path) -> bool:
    """`up` until it says that it is ready, a first answer, the tools beside it, and its end."""
    port, began = free_port(), time.perf_counter()
    command = [baton, "up", "--port", str(port)]
    with serving(command, cwd=folder, log=folder / "up.log", ready_s=READY_S):
        _add(page, "up_ready", time.perf_counter() - began, target=TARGETS["up_ready"])
        first, whole, text = _answer(f"http://127.0.0.1:{port}")
        _add(page, "first_token", first)
        _add(page, "first_answer", whole, target=TARGETS["first_answer"])
        for name, line in {"top": ["top"], "trace": ["trace"], "doctor": ["doctor"]}.items():
            wall, cpu = _timed([baton, *line], folder)
            _add(page, f"beside_up_{name}", wall)
            _add(page, f"beside_up_{name}_cpu", cpu)
        began = time.perf_counter()
    _add(page, "stop", time.perf_counter() - began)
    return "Paris" in text


def _real(page: ResultsPage, baton: str, folder: Path) -> None:
    """A published model, fetched before: seconds from the start of `up` to the first token, and each process's own memory."""
    fetched(REAL, lambda line: print(line, file=sys.stderr))
    port, began = free_port(), time.perf_counter()
    command = [baton, "up", "--model", REAL, "--port", str(port)]
    with serving(command, cwd=folder, log=folder / "real.log", ready_s=READY_S) as pid:
        ready = time.perf_counter() - began
        _add(page, "real_up_ready", ready)
        first, _, _ = _answer(f"http://127.0.0.1:{port}", REAL)
        _add(page, "real_first_token", ready + first, target=TARGETS["real_first_token"])
        each = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        _add(page, "real_start_cpu", sum(sum(one.cpu_times()[:2]) for one in each))
        for process in each:
            name = next((part.removeprefix("services.") for part in process.cmdline() if "services." in part), "")
            if name in ("gateway", "decode", "worker"):
                name, bytes_ = f"real_{name}_memory", process.memory_full_info().pss
                _add(page, name, bytes_ / 1e6, "MB", TARGETS.get(name))


def _answer(url: str, model: str = "demo") -> tuple[float, float, str]:
    """Seconds to the first token and to the end of the first chat, and its text."""
    asked_for = {"model": model, "stream": True, "temperature": 0, "max_tokens": MOST_TOKENS}
    body = asked_for | {"messages": [{"role": "user", "content": QUESTION}]}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, first, text = time.perf_counter(), 0.0, ""
    with _opened(asked) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                text += (choices[0]["delta"].get("content") or "") if choices else ""
                first = first or (time.perf_counter() - began if text else 0.0)
    return first, time.perf_counter() - began, text


@contextmanager
def _opened(asked: urllib.request.Request) -> Iterator[Iterator[bytes]]:
    with urllib.request.urlopen(asked, timeout=READY_S) as answer:
        yield iter(answer)


def _console(page: ResultsPage) -> None:
    """All files of the page, as they are and as they are sent."""
    static = (ROOT / "gateway/console/static").rglob("*")
    files = [path.read_bytes() for path in static if path.suffix in (".html", ".css", ".js", ".svg")]
    _add(page, "page", sum(map(len, files)) / 1e3, "kB")
    _add(page, "page_zipped", sum(len(gzip.compress(file, mtime=0)) for file in files) / 1e3, "kB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
