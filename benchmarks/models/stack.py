"""A `baton up` that loads models on demand, with what a benchmark asks about it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import psutil

from benchmarks.environment import ROOT
from services.runtime.servers import free_port

READY_S = 180.0
IDLE_S = 120.0
STOP_S = 60.0
LOOK_S = 0.05
_LOADING = re.compile(r'host\.model\b.*?\bmodel["=: ]+([\w.-]+).*?\bstatus["=: ]+loading')


class Stack:
    """One that runs."""

    def __init__(self, pid: int, client: httpx.AsyncClient, folder: Path) -> None:
        self._pid = pid
        self._folder = folder
        self.client = client

    async def unloaded(self, *models: str) -> None:
        """Unload models, and return when none of them is loaded."""
        await self._put(models, "2")
        await self._until_only({"unloaded", "failed"}, set(models))

    async def stays(self, model: str) -> None:
        """Load a model, and have it stay though nobody asks it."""
        body = {"model": model, "keep_alive": "10m", "stream": False}
        (await self.client.post("/api/generate", json=body)).raise_for_status()
        await self._until_only({"ready"}, {model})

    async def parked(self, model: str) -> bool:
        """Let a model sleep with its weights in memory; False if its host unloaded it instead, as where memory lacks."""
        await self._until_only({"ready"}, {model})  # who is told to sleep while it loads is unloaded
        await self._put([model], "1")
        await self._until_only({"parked", "unloaded"}, {model})
        return (await self._states())[model] == "parked"

    async def _put(self, models: Sequence[str], level: str) -> None:
        async with asyncio.timeout(IDLE_S):
            for model in models:
                order = {"model": model, "level": level}
                while (answer := await self.client.post("/sleep", params=order)).status_code == 409:
                    await asyncio.sleep(LOOK_S)  # the last heartbeat still had its request
                answer.raise_for_status()

    async def is_idle(self) -> None:
        """Return once nothing is loaded any more."""
        await self._until_only({"unloaded", "failed"}, None)

    async def _until_only(self, wanted: set[str], models: set[str] | None) -> None:
        async with asyncio.timeout(IDLE_S):
            while True:
                states = await self._states()
                if all(states.get(model) in wanted for model in (models or states)):
                    return
                await asyncio.sleep(LOOK_S)

    async def _states(self) -> dict[str, str]:
        """Each model's status at its host."""
        metrics = (await self.client.get("/metrics")).text
        found = re.findall(r'^baton_hosted_models\{model_name="([^"]+)",status="([^"]+)"\} 1', metrics, re.MULTILINE)
        return dict(found)

    def loads(self) -> Counter[str]:
        """Loads of each model so far, by the host's log."""
        text = "".join(file.read_text(errors="replace") for file in self._folder.rglob("host*.log"))
        return Counter(_LOADING.findall(text))

    def memory_mb(self) -> float:
        """Private bytes of all processes."""
        total = 0
        for process in psutil.Process(self._pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
        return total / 1e6


@contextlib.asynccontextmanager
async def running(words: Sequence[str], folder: Path) -> AsyncIterator[Stack]:
    """`baton up` with these flags, until the block ends. Raises RuntimeError with its output if it doesn't start."""
    port, log = free_port(), folder / "up.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.up", "--port", str(port), "--data-dir", str(folder / "data"), *words),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        await _says(process, log, "Baton serves")
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=IDLE_S, limits=limits) as client:
            yield Stack(process.pid, client, folder / "data")
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _says(process: asyncio.subprocess.Process, log: Path, words: str) -> None:
    until = asyncio.get_running_loop().time() + READY_S
    while words not in log.read_text(errors="replace"):
        if process.returncode is not None or asyncio.get_running_loop().time() > until:
            raise RuntimeError(log.read_text(errors="replace"))
        await asyncio.sleep(LOOK_S)
