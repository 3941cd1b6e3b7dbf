"""NATS and Redis with a user for each process, and processes that a test starts: hosts, a gateway, a planner.

`followed` has one of each: the host's model gets a second worker while the planner counts two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from common import subjects
from common.bus import NatsSettings, connect_bus
from common.messages import HostedModel, HostState, host_state_decoder
from common.peers import Peers
from common.store import RedisSettings
from services.runtime.linux import die_with_parent
from services.runtime.permissions import Member, Users, make_users
from services.runtime.servers import Server, run_nats, run_redis, stop
from services.up.servers import install_library
from tests.e2e.stack import ROOT
from tests.ports import own_port

PATIENCE_S = 120.0


@dataclass
class Site:
    """Servers, users, and processes by name. `url` is the gateway's."""

    folder: Path
    users: Users
    nats: Server
    redis: Server
    url: str
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    def reach(self, user: str) -> dict[str, str]:
        """Settings by which a process reaches the servers as this user."""
        return {
            "nats_url": self.nats.address,
            "nats_credentials": str(self.users.nats_file(user)),
            "redis_url": self.redis.address,
            "redis_credentials": str(self.users.redis_file(user)),
        }

    def flags(self, user: str, *servers: str) -> list[str]:
        """The same as options of a command, of these servers."""
        reach = {name: value for name, value in self.reach(user).items() if name.partition("_")[0] in servers}
        return [word for name, value in reach.items() for word in (f"--{name.replace('_', '-')}", value)]

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    async def start(self, name: str, *words: str) -> None:
        """Start `python -m WORDS`, with a log of this name."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *words), cwd=ROOT, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent
            )

    async def until_ready(self) -> None:
        """Wait until the gateway would serve."""
        async with httpx.AsyncClient(base_url=self.url, timeout=2.0) as client, asyncio.timeout(PATIENCE_S):
            while not await _is_ready(client):
                await asyncio.sleep(0.05)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get("/ready")).status_code == 200
    return False


@contextlib.asynccontextmanager
async def site(folder: Path, members: Sequence[Member]) -> AsyncIterator[Site]:
    """Servers with these users. Processes end on exit; on an error the ends of their logs are added to it."""
    users = make_users(members, folder / "users")
    async with (
        run_nats(data_dir=folder / "nats", extra=users.nats) as nats,
        run_redis(data_dir=folder / "redis", users=users.redis) as redis,
    ):
        nats.login, redis.login = users.admin_nats, users.admin_redis
        await install_library(RedisSettings(url=redis.url))
        found = Site(folder, users, nats, redis, f"http://127.0.0.1:{own_port()}")
        try:
            yield found
        except BaseException as error:
            logs = [*folder.glob("*.log"), *folder.glob("logs*/*.log")]
            error.add_note("\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs))
            raise
        finally:
            await asyncio.gather(*(stop(process, timeout_s=10) for process in found.processes.values()))


OWN, SPARE = "h-decode-0", "h-decode-1"
QUICK = ("--plan-period-s", "0.2", "--plan-hold-s", "1")


@dataclass
class Followed:
    """The host `h` of the model `tiny` with one decode worker and a spare one, heard by a bystander."""

    site: Site
    model: Path
    step_ms: float
    peers: Peers = field(default_factory=Peers)
    said: HostedModel = field(default_factory=HostedModel)  # the host, last

    async def start_host(self) -> None:
        self.said = HostedModel()
        options = {
            "model": str(self.model),
            "device": f"fake:{self.step_ms:g}:50",
            "kv_memory_mb": 8,
            "max_sequences": 8,
        }
        lines = "".join(
            f"{key} = {json.dumps(value)}\n" for key, value in (options | self.site.reach("decode")).items()
        )
        entry = '[[worker]]\nmodel = "tiny"\nservice = "decode"\nmost = 2\n[worker.options]\n'
        file = self.site.folder / "host.toml"
        file.write_text(f'name = "h"\ndrain_s = 60\n{entry}{lines}')
        await self.site.start("h", "services.host", str(file), *self.site.flags("h", "nats"))

    def saw(self, state: HostState) -> None:
        self.said = state.models["tiny"]


@contextlib.asynccontextmanager
async def followed(folder: Path, model: Path, *, step_ms: float = 20, pause_s: float = 6) -> AsyncIterator[Followed]:
    """All of it, in processes of their own. `pause_s`: until the planner counts fewer."""
    members = [Member("gateway", "g"), Member("planner", "p"), Member("host", "h"), Member("decode")]
    async with site(folder, members) as running:
        found = Followed(running, model, step_ms)
        await found.start_host()
        words = ["tests.e2e.tuned", "gateway", "--slo-window-s", "3", "--gateway-id", "g", "--port", running.port]
        words += [*running.flags("g", "nats", "redis"), "--model", f"tiny={model}", "--keep-alive", "-1"]
        await running.start("g", *words)
        words = ["tests.e2e.tuned", "planner", *QUICK, "--plan-pause-s", f"{pause_s:g}", "--planner-id", "p"]
        await running.start("p", *words, *running.flags("p", "nats"))
        await running.until_ready()
        async with connect_bus(NatsSettings(url=running.nats.url), name="bystander") as bus:
            await found.peers.start(bus)
            await bus.subscribe(subjects.host_heartbeat("h"), host_state_decoder, found.saw)
            yield found
            await found.peers.close()
