"""The processes that are measured: which core each has, and how much of it it used."""

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

import psutil

from benchmarks.environment import ROOT
from benchmarks.tracing import until_ready
from services.runtime.servers import free_port, run_nats

MEASURED, OTHERS = {0}, {1}  # cores: the gateway's, and everybody else's
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A server that streams answers, and its process."""

    name: str
    port: int
    pid: int
    pids: list[int]  # and of those that feed it

    def cpu_s(self) -> float:
        """Seconds on a CPU since the process began, all its threads; clock ticks of 10 ms would be too coarse."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@dataclass(frozen=True, slots=True)
class Baton:
    """A gateway with one worker of the fake device."""

    gateway: Arm
    nats_url: str


@contextlib.asynccontextmanager
async def baton(step_ms: float) -> AsyncIterator[Baton]:
    """Start it: the gateway alone on its core."""
    with tempfile.TemporaryDirectory() as folder:
        async with run_nats(data_dir=Path(folder) / "nats") as nats:
            port = free_port()
            command = [sys.executable, "-m", "services.up", "--port", str(port), "--data-dir", f"{folder}/up"]
            command += ["--fake", "--fake-step-ms", str(step_ms), "--fake-token-us", "1", "--served-model-name", "demo"]
            command += ["--prefill", "0", "--max-sequences", "512", "--max-requests", "1024", "--nats-url", nats.url]
            command += ["--batch-store-mb", "0", "--max-model-len", "4096", "--threads", "1"]
            with _process(command) as up:
                await asyncio.to_thread(_until_decoding, port, up)
                children = psutil.Process(up.pid).children(recursive=True)
                gateway = next(child.pid for child in children if "services.gateway" in child.cmdline())
                for child in children:
                    _pin(child.pid, MEASURED if child.pid == gateway else OTHERS)
                _pin(nats.process.pid, OTHERS)
                pids = [*(one.pid for one in children), nats.process.pid]
                yield Baton(Arm("baton", port, gateway, pids), nats.url)


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


def _until_decoding(port: int, up: subprocess.Popen[bytes]) -> None:
    until_ready(port, up, role="decode")


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)
