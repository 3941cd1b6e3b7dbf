"""Two hosts, a process each, with users of their own on NATS: one of them loads a model, and the other one takes over."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from services.runtime.permissions import Member
from tests.e2e.hosting import PATIENCE_S, Site, site
from tests.models import build_tiny_model

HOSTS = ("a", "b")
MODELS = ("small", "large")


@dataclass
class Hosts:
    """Two hosts that offer the same two models, each by workers of its own, and a gateway."""

    site: Site
    models: dict[str, Path]

    def written(self, name: str) -> Path:
        """A host's file."""
        text = f'name = "{name}"\nmax_loaded = 1\nlogs = "logs-{name}"\ndrain_s = 5\n'
        for number, model in enumerate(MODELS):
            options = {"model": str(self.models[model]), "device": "fake:1:50", "kv_memory_mb": 8}
            options |= self.site.reach(f"{name}-decode-{number}")
            lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
            text += f'[[worker]]\nmodel = "{model}"\nservice = "decode"\n[worker.options]\n{lines}'
        file = self.site.folder / f"{name}.toml"
        file.write_text(text)
        return file

    async def start(self, name: str) -> None:
        if name in HOSTS:
            await self.site.start(name, "services.host", str(self.written(name)), *self.site.flags(name, "nats"))
            return
        words = ["services.gateway", "--gateway-id", name, "--port", self.site.port]
        words += self.site.flags(name, "nats", "redis")
        words += [word for model in MODELS for word in ("--model", f"{model}={self.models[model]}")]
        await self.site.start(name, *words, "--keep-alive", "-1")

    def workers(self, name: str) -> int:
        """The worker processes of a host."""
        found = psutil.Process(self.site.processes[name].pid).children(recursive=True)
        return sum("services.decode" in " ".join(_words(one)) for one in found)

    async def ask(self, model: str) -> int:
        async with httpx.AsyncClient(base_url=self.site.url, timeout=PATIENCE_S) as client:
            answer = await client.post("/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 4})
            return answer.status_code


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Hosts]:
    workers = [Member("decode", f"{name}-decode-{number}") for name in HOSTS for number in range(len(MODELS))]
    members = [Member("gateway", "g"), *(Member("host", name) for name in HOSTS), *workers]
    async with site(folder, members) as found:
        models = {name: build_tiny_model(folder / name, "llama", seed=seed) for seed, name in enumerate(MODELS)}
        hosts = Hosts(found, models)
        for name in (*HOSTS, "g"):
            await hosts.start(name)
        await found.until_ready()
        yield hosts


async def eventually(hosts: Hosts, *counts: int) -> None:
    """Wait until the hosts have so many workers."""
    async with asyncio.timeout(PATIENCE_S):
        while tuple(hosts.workers(name) for name in HOSTS) not in {counts, counts[::-1]}:
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_one_host_loads_a_model_the_other_one_the_next_and_takes_over_what_dies(tmp_path: Path) -> None:
    async with running(tmp_path) as hosts:
        assert [hosts.workers(name) for name in HOSTS] == [0, 0]
        assert await hosts.ask("small") == 200
        await eventually(hosts, 1, 0)
        assert await hosts.ask("large") == 200
        await eventually(hosts, 1, 1)  # each has a single place
        assert await hosts.ask("small") == 200
        has, other = HOSTS if "large" in _loaded(hosts, "a") else HOSTS[::-1]
        hosts.site.processes[has].kill()
        await hosts.site.processes[has].wait()
        assert await hosts.ask("large") == 200  # by the host that is left, where small gives way
        assert "large" in _loaded(hosts, other)


def _loaded(hosts: Hosts, name: str) -> str:
    """Lines of a host's log about models that became ready."""
    lines = (hosts.site.folder / f"{name}.log").read_text().splitlines()
    return "\n".join(line for line in lines if "host.model" in line and "status=ready" in line)
