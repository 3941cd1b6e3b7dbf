"""The way of a streamed chat request through a gateway and its workers: so few files that a person can read them.

A file counts if a function of it is entered during every one of some requests, and never while nothing is asked: heartbeats
don't count. On a GPU others of the engine's files would, so workers compute on the CPU here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.e2e.cluster import ROOT, Cluster
from tests.unit.house.measures import allowed

HOOK = Path(__file__).with_name("traced")
NOT_OURS = {".venv", "tests"}
SETTLED_S = 1.0
IDLE_S = 3.0  # longer than every period of what serves nobody
REQUESTS = 3
BUSY_REQUESTS = 12  # on a busy machine heartbeats fall into some of them, not into all
MIN_FILES = 30
TIMER = "Watchdog.run"
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """A function of ours."""

    file: str
    function: str


QUEUES = Place("common/job_queue.py", "JobStream.publish")
WATCHES = Place(
    "gateway/http/streaming.py", "disconnected"
)  # a task: on a busy machine it begins before the job is queued


class TracedCluster(Cluster):
    """A gateway and its workers, each in a process that notes what it enters."""

    turns = 0

    async def start(self, name: str) -> None:
        service = name.partition("-")[0]
        flags = self._gateway_flags(name) if service == "gateway" else self._worker_flags(name)
        variables = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{HOOK}",
            "TRACED_TO": str(self.folder),
            "TRACED_NOT_OF": TIMER,
            "CUDA_VISIBLE_DEVICES": "",
        }
        env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")} | variables
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"services.{service}", *flags), env=env, cwd=ROOT, stdout=log, stderr=log
            )

    async def ask(self, prompt: str) -> None:
        """Have a streamed chat request answered, by both workers."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 16}
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            answer = await client.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text

    async def entered(self) -> dict[Place, float]:
        """Place -> the instant of its first entry since the last call."""
        self.turns += 1
        pids = [process.pid for process in self.processes.values()]
        for pid in pids:
            os.kill(pid, signal.SIGRTMIN)
        found: dict[Place, float] = {}
        for pid in pids:
            for file, function, at in await _written(self.folder / f"{pid}.{self.turns}.json"):
                if not (path := Path(file)).is_relative_to(ROOT) or path.suffix != ".py":
                    continue
                path = path.relative_to(ROOT)
                if NOT_OURS.isdisjoint(path.parts):
                    place = Place(str(path), function)
                    found[place] = min(at, found.get(place, at))
        return found


async def _written(path: Path) -> list[tuple[str, str, float]]:
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists():
            await asyncio.sleep(0.01)
    lines: list[tuple[str, str, float]] = json.loads(path.read_text())
    return lines


def _ways(found: list[dict[Place, float]], idle: dict[Place, float]) -> dict[str, set[str]]:
    """A measure's name -> the files that every request entered, in all and before its job was queued."""
    before = [{place for place, at in each.items() if at <= each[QUEUES] and place != WATCHES} for each in found]
    return {
        "files_of_a_request": {place.file for place in set.intersection(*map(set, found)) - idle.keys()},
        "files_before_a_job_is_queued": {place.file for place in set.intersection(*before) - idle.keys()},
    }


def _are_few(ways: dict[str, set[str]]) -> bool:
    return all(len(way) <= allowed()[name] for name, way in ways.items())


async def test_a_streamed_chat_request_enters_few_files(tmp_path: Path) -> None:
    async with TracedCluster(tmp_path, model=ROOT / "demo", dtype="float32") as cluster:
        for number in range(REQUESTS):
            await cluster.ask(f"What is {number}?")  # the first ones load what later ones find
        await asyncio.sleep(SETTLED_S)
        await cluster.entered()
        await asyncio.sleep(IDLE_S)
        idle, found = await cluster.entered(), list[dict[Place, float]]()
        while len(found) < REQUESTS or (len(found) < BUSY_REQUESTS and not _are_few(_ways(found, idle))):
            await cluster.ask(f"What is {len(found)} about?")
            await asyncio.sleep(SETTLED_S)  # what workers tell of it comes later
            found.append(await cluster.entered())
    for name, way in _ways(found, idle).items():
        print(f"{name} = {len(way)}", *sorted(way), sep="\n    ")  # `pytest -s` shows them
        assert len(way) <= allowed()[name], f"{name} is {len(way)}: {', '.join(sorted(way))}"
        assert len(way) > MIN_FILES, f"not all was traced: {', '.join(sorted(way))}"
