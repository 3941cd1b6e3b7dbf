"""Baton with the fake device, and plain servers: which core each process has, and how much of it it used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.environment import ROOT
from services.runtime.servers import free_port, run_nats

MEASURED, OTHERS = {0}, {1}  # cores: the gateway's, and everybody else's
SERVICES = ("gateway", "prefill", "decode")
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A server that streams answers, and its process."""

    name: str
    port: int
    pid: int
    pids: list[int]  # and of those that feed it

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


@dataclass(frozen=True, slots=True)
class Baton:
    """A gateway with one worker of the fake device."""

    gateway: Arm
    nats_url: str


def cpu_s(pid: int) -> float:
    """Seconds on a CPU since the process began, all its threads; clock ticks of 10 ms would be too coarse."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


@contextlib.contextmanager
def fake_baton(
    *flags: str, step_ms: float, token_us: float = 50.0, ready: str = "prefill"
) -> Iterator[tuple[int, subprocess.Popen[bytes], dict[str, psutil.Process]]]:
    """`baton up` with the fake device, once a worker of the role `ready` is there: its port, itself, its services."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "services.up", "--port", str(port), "--data-dir", folder]
        command += ["--device", f"fake:{step_ms}:{token_us}", "--served-model-name", "demo", *flags]
        with _process(command) as up:
            _until_ready(port, up, ready)
            yield port, up, _services_of(up.pid)


def _until_ready(port: int, up: subprocess.Popen[bytes], role: str) -> None:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at and up.poll() is None:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=2)
            if answer.status_code == 200 and answer.json()["workers"][role]:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit("baton up did not get ready")


def _services_of(pid: int) -> dict[str, psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return {name: child for child in children for name in SERVICES if f"services.{name}" in child.cmdline()}


@contextlib.asynccontextmanager
async def baton(step_ms: float, *more: str) -> AsyncIterator[Baton]:
    """Start it, with `more` flags: the gateway alone on its core."""
    with tempfile.TemporaryDirectory() as folder:
        async with run_nats(data_dir=Path(folder) / "nats") as nats:
            flags = ["--prefill", "0", "--max-sequences", "512", "--max-requests", "1024"]
            flags += [
                "--nats-url",
                nats.url,
                "--batch-store-mb",
                "0",
                "--max-model-len",
                "4096",
                "--threads",
                "1",
                *more,
            ]
            starting = fake_baton(*flags, step_ms=step_ms, token_us=1.0, ready="decode")
            port, up, services = await asyncio.to_thread(starting.__enter__)
            try:
                gateway, children = services["gateway"].pid, psutil.Process(up.pid).children(recursive=True)
                for child in children:
                    _pin(child.pid, MEASURED if child.pid == gateway else OTHERS)
                _pin(nats.process.pid, OTHERS)
                pids = [*(one.pid for one in children), nats.process.pid]
                yield Baton(Arm("baton", port, gateway, pids), nats.url)
            finally:
                starting.__exit__(None, None, None)


@contextlib.contextmanager
def plain(kind: str, step_ms: float) -> Iterator[Arm]:
    """Start a plain server on the gateway's core."""
    port = free_port()
    with _process([sys.executable, "-m", "benchmarks.gateway.plain", kind, str(port), str(step_ms)]) as process:
        give_up_at = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if time.monotonic() > give_up_at or process.poll() is not None:
                raise RuntimeError(f"the plain server {kind} did not start")
            time.sleep(0.05)
        _pin(process.pid, MEASURED)
        yield Arm(kind, port, process.pid, [process.pid])


@contextlib.contextmanager
def undisturbed(pids: dict[int, int]) -> Iterator[bool]:
    """Let no other program come between these processes: pid -> priority. Whether this user may do that."""
    tasks = [int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    priority = {int(task.name): rank for pid, rank in pids.items() for task in Path(f"/proc/{pid}/task").iterdir()}
    try:
        for task in tasks:
            os.sched_setscheduler(task, os.SCHED_FIFO, os.sched_param(priority[task]))
        yield True
    except PermissionError:
        yield False
    finally:
        for task in tasks:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))


def pin_this() -> None:
    """This process is the client."""
    _pin(os.getpid(), OTHERS)


def _pin(pid: int, cores: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)
