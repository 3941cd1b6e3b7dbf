"""From `baton up` to the first streamed token over HTTP, and the memory of all its processes then.

    python -m benchmarks.start                                     the demo model
    python -m benchmarks.start --rounds 5 -- --model FOLDER …       with flags of `baton up`
    python -m benchmarks.start --make                              by `make up`, as a newcomer types it

Memory is PSS: pages that processes share count once. Pages of programs' files count less where other processes of the machine
have them, too, so own pages, which are of no file, are told beside. CPU seconds are of all processes; those that ended and
were waited for count as their parent's, `up`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.environment import ROOT, describe
from services.runtime.servers import free_port

GIVE_UP_S = 120.0
PAUSE_S = 0.01  # between attempts to get an answer
MEASURED = ("CPU, s", "PSS, MB", "own, MB")
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--make", action="store_true", help="start by `make up` instead of `baton up`")
    parser.add_argument("flags", nargs="*", help="of `baton up`")
    options = parser.parse_args()
    for name, value in describe("benchmarks.start", sys.argv[1:], torch.device("cpu")).items():
        print(f"- {name}: {value}")
    print(f"- load average: {os.getloadavg()[0]:.1f}")
    rounds = []
    for _ in range(options.rounds):
        rounds.append(measured(options.flags, by_make=options.make))
        print(json.dumps(rounds[-1].whole), flush=True)
    print("median:", _medians([each.whole for each in rounds]))
    for name in rounds[0].parts:
        print(f"{name}:", _medians([each.parts[name] for each in rounds]))
    print(f"- load average: {os.getloadavg()[0]:.1f}")
    return 0


@dataclass(frozen=True, slots=True)
class Start:
    """The duration of one start, and each process's share."""

    whole: dict[str, float]
    parts: dict[str, dict[str, float]]


def measured(flags: list[str], *, by_make: bool) -> Start:
    """Start, ask for one token, look at every process, stop."""
    port, began = free_port(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--port", str(port), "--data-dir", folder, *flags]
        command = ["make", "-s", "up", f"ARGS={' '.join(flags)}"] if by_make else ["./baton", "up", *flags]
        up = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            first_token_s = _first_token(port, began, up)
            pids = list(_family(up.pid))
            parts: dict[str, dict[str, float]] = {}
            for pid in pids:
                part = parts.setdefault(_name(pid), dict.fromkeys(MEASURED, 0.0))
                part["CPU, s"] += _cpu_seconds(pid)
                part["PSS, MB"] += _pss_mb(pid, "Pss")
                part["own, MB"] += _pss_mb(pid, "Pss_Anon")
            whole = {name: round(sum(part[name] for part in parts.values()), 2) for name in MEASURED}
            return Start({"first token, s": round(first_token_s, 3), **whole, "processes": len(pids)}, parts)
        finally:
            os.killpg(up.pid, signal.SIGTERM)  # make hands it on to nobody
            up.wait(timeout=GIVE_UP_S)


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in found), 2) for name in found[0]}


def _first_token(port: int, began: float, up: subprocess.Popen[bytes]) -> float:
    """Seconds until an answer's first text."""
    body = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
    while time.monotonic() < began + GIVE_UP_S and up.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
        try:
            if not body["model"]:
                connection.request("GET", "/v1/models")
                models = json.loads(connection.getresponse().read()).get("data", [])
                if not models:
                    raise ConnectionError
                body["model"] = models[0]["id"]
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == 200 and any(b'"content":"' in line and b'""' not in line for line in response):
                return time.monotonic() - began
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            connection.close()
        time.sleep(PAUSE_S)
    raise RuntimeError("no token came: `baton up` says why")


def _family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _name(pid: int) -> str:
    """The name of a process: `services.decode`, `up`, `nats-server`."""
    words = Path(f"/proc/{pid}/cmdline").read_text().strip("\0").split("\0")
    module = next((word for word in words if word.startswith("services.")), "up" if "up" in words else words[0])
    return Path(module.partition(" ")[0]).name


def _cpu_seconds(pid: int) -> float:
    """Its own and that of children that it waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def _pss_mb(pid: int, kind: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1024


if __name__ == "__main__":
    sys.exit(main())
