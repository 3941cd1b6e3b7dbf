"""Two hosts, a process each, with users of their own on NATS: one of them loads a model, and the other one takes over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from common.store import RedisSettings
from services.runtime.linux import die_with_parent
from services.runtime.permissions import Member, Users, make_users
from services.runtime.servers import Server, run_nats, run_redis, stop
from services.up.servers import install_library
from tests.e2e.stack import ROOT
from tests.models import build_tiny_model
from tests.ports import own_port

PATIENCE_S = 120.0
HOSTS = ("a", "b")
MODELS = ("small", "large")


@dataclass
class Hosts:
    """Two hosts that offer the same two models, each by workers of its own, and a gateway."""

    folder: Path
    models: dict[str, Path]
    users: Users
    nats: Server
    redis: Server
    url: str
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    def reach(self, user: str) -> dict[str, str]:
        return {
            "nats_url": self.nats.address,
            "nats_credentials": str(self.users.nats_file(user)),
            "redis_url": self.redis.address,
            "redis_credentials": str(self.users.redis_file(user)),
        }

    def written(self, name: str) -> Path:
        """A host's file."""
        text = f'name = "{name}"\nmax_loaded = 1\nlogs = "logs-{name}"\ndrain_s = 5\n'
        for number, model in enumerate(MODELS):
            options = {"model": str(self.models[model]), "device": "fake:1:50", "kv_memory_mb": 8}
            options |= self.reach(f"{name}-decode-{number}")
            lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
            text += f'[[worker]]\nmodel = "{model}"\nservice = "decode"\n[worker.options]\n{lines}'
        file = self.folder / f"{name}.toml"
        file.write_text(text)
        return file

    async def start(self, name: str) -> None:
        if name in HOSTS:
            reach = self.reach(name)
            words = ["services.host", str(self.written(name)), "--nats-url", reach["nats_url"]]
            words += ["--nats-credentials", reach["nats_credentials"]]
        else:
            words = ["services.gateway", "--gateway-id", name, "--port", self.url.rpartition(":")[2]]
            words += [word for key, value in self.reach(name).items() for word in (f"--{key.replace('_', '-')}", value)]
            words += [word for model in MODELS for word in ("--model", f"{model}={self.models[model]}")]
            words += ["--keep-alive", "-1"]
        env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *words), cwd=ROOT, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent
            )

    def workers(self, name: str) -> int:
        """The worker processes of a host."""
        found = psutil.Process(self.processes[name].pid).children(recursive=True)
        return sum("services.decode" in " ".join(_words(one)) for one in found)

    async def ask(self, model: str) -> int:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as client:
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
    users = make_users(members, folder / "users")
    async with (
        run_nats(data_dir=folder / "nats", extra=users.nats) as nats,
        run_redis(data_dir=folder / "redis", users=users.redis) as redis,
    ):
        redis.login = users.admin_redis
        await install_library(RedisSettings(url=redis.url))
        models = {name: build_tiny_model(folder / name, "llama", seed=seed) for seed, name in enumerate(MODELS)}
        hosts = Hosts(folder, models, users, nats, redis, f"http://127.0.0.1:{own_port()}")
        try:
            for name in (*HOSTS, "g"):
                await hosts.start(name)
            async with httpx.AsyncClient(base_url=hosts.url, timeout=2.0) as client, asyncio.timeout(PATIENCE_S):
                while not await _is_ready(client):
                    await asyncio.sleep(0.05)
            yield hosts
        except BaseException as error:
            logs = [*folder.glob("*.log"), *folder.glob("logs-*/*.log")]
            error.add_note("\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs))
            raise
        finally:
            await asyncio.gather(*(stop(process, timeout_s=10) for process in hosts.processes.values()))


async def _is_ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get("/ready")).status_code == 200
    return False


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
        hosts.processes[has].kill()
        await hosts.processes[has].wait()
        assert await hosts.ask("large") == 200  # by the host that is left, where small gives way
        assert "large" in _loaded(hosts, other)


def _loaded(hosts: Hosts, name: str) -> str:
    """Lines of a host's log about models that became ready."""
    lines = (hosts.folder / f"{name}.log").read_text().splitlines()
    return "\n".join(line for line in lines if "host.model" in line and "status=ready" in line)
