"""A cluster that can be hurt: processes and servers are killed, stopped, started again. Every fault is seen to have happened."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from common.bus import NatsSettings, connect_bus
from common.peers import Peers
from tests.chaos.checks import held
from tests.e2e.cluster import READY_S, Cluster
from tests.ports import own_port

IDLE_WITHIN_S = 30.0
FAKE = {"fake": True, "kv_memory_mb": 8}
SERVERS = ("nats", "redis")
LEAVES_WITHIN_S = 40.0
SENT_WITHIN_S = (
    0.2  # what was meant for a gateway before the balancer took it out has arrived there, as after a preStop hook
)


class FaultDidNotHappenError(AssertionError):
    """An injected fault left no trace: the test would prove nothing."""


class ChaosCluster(Cluster):
    """`Cluster` whose NATS and Redis can die as well; `faults` lists what was done to it.

    `fake_faults`: what goes wrong with the device of which worker.
    """

    def __init__(
        self, folder: Path, *, model: Path, fake_faults: dict[str, str] | None = None, **options: object
    ) -> None:
        super().__init__(folder, model=model, **options)  # type: ignore[arg-type]
        self._fake_faults = fake_faults or {}
        self.faults: list[str] = []
        self.leaving: set[str] = set()  # gateways that get no new requests
        self._turns = itertools.count()
        self.peers = Peers()
        self.nats_monitor = own_port()

    async def __aenter__(self) -> ChaosCluster:
        await super().__aenter__()
        bus = await self._stack.enter_async_context(connect_bus(NatsSettings(url=self.nats.url), name="chaos"))
        await self.peers.start(bus)
        self._stack.push_async_callback(self.peers.close)
        return self

    def _worker_flags(self, name: str) -> list[str]:
        faults = self._fake_faults.get(name, "")
        return super()._worker_flags(name) + (["--fake-faults", faults] if faults else [])

    def _nats_config(self) -> str:
        return f'{super()._nats_config()}\nhttp: "127.0.0.1:{self.nats_monitor}"\n'

    # -- faults ----------------------------------------------------------------------------------------------------

    async def crash(self, name: str) -> None:
        """kill -9."""
        process = self._process(name)
        process.kill()
        if await process.wait() != -signal.SIGKILL:
            raise FaultDidNotHappenError(f"{name} ended with {process.returncode} before it was killed")
        self.faults.append(f"kill -9 {name}")

    async def freeze(self, name: str) -> None:
        """SIGSTOP."""
        process = self._process(name)
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            while _state(process.pid) != "T":
                await asyncio.sleep(0.005)
        self.faults.append(f"SIGSTOP {name}")

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        process = self._process(name)
        if _state(process.pid) != "T":
            raise FaultDidNotHappenError(f"{name} was not stopped all the time")
        process.send_signal(signal.SIGCONT)

    async def again(self, name: str) -> None:
        """Start what was killed, and wait until it serves."""
        if name in SERVERS:
            await self._server_again(name)
        else:
            before = self._incarnation(name)
            await self.start(name)
            if name in self.names:  # until it is missed, the gateway counts the dead one
                async with asyncio.timeout(READY_S):
                    while self._incarnation(name) in (0, before):
                        await asyncio.sleep(0.05)
        await self.until_ready()

    async def leave(self, name: str) -> None:
        """SIGTERM, and wait until it has drained. A gateway is taken out of the balancer first."""
        self.leaving.add(name)
        process = self.processes[name]
        await asyncio.sleep(SENT_WITHIN_S if name in self.gateways else 0)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LEAVES_WITHIN_S):
            code = await process.wait()
        if code != 0:
            raise AssertionError(f"{name} did not drain: exit code {code}\n{self.logs()}")
        self.faults.append(f"SIGTERM {name}")

    async def restart(self, name: str) -> None:
        """Let a process leave, and start it again."""
        await self.leave(name)
        await self.again(name)
        self.leaving.discard(name)

    def balance(self) -> str:
        """The next gateway's URL, in turn, of those that aren't leaving: what a load balancer knows from /ready."""
        staying = [name for name in self.gateways if name not in self.leaving]
        return self.urls[staying[next(self._turns) % len(staying)]]

    def _incarnation(self, name: str) -> int:
        """Of the worker that is heard under this name; 0 for nobody."""
        state = self.peers.states.get(name)
        return state.incarnation if state is not None and state.status == "ready" else 0

    def _process(self, name: str) -> asyncio.subprocess.Process:
        return {"nats": self.nats, "redis": self.redis}[name].process if name in SERVERS else self.processes[name]

    async def _server_again(self, name: str) -> None:
        if name == "nats":
            await self.start_nats(port=self.nats.port)
        else:
            await self.start_redis(port=self.redis.port)

    # -- what is to see --------------------------------------------------------------------------------------------

    async def busiest(self, role: str) -> str:
        """Wait until a worker of `role` has work; return the one that has most."""
        async with asyncio.timeout(60):
            while True:
                states = [state for state in self.peers.states.values() if role in state.roles and state.running]
                if states:
                    return max(states, key=lambda state: state.running).worker
                await asyncio.sleep(0.02)

    async def until_idle(self) -> list[str]:
        """Wait until no worker holds anything; return what is still held after `IDLE_WITHIN_S`."""
        give_up_at = time.monotonic() + IDLE_WITHIN_S
        while True:
            left = held([state for state in self.peers.states.values() if state.worker in self.names], self.names)
            if not left or time.monotonic() > give_up_at:
                return left
            await asyncio.sleep(0.05)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the services and the servers."""
        services = {name: process.pid for name, process in self.processes.items()}
        return services | {"nats": self.nats.process.pid, "redis": self.redis.process.pid}

    async def metrics(self) -> dict[str, float]:
        """The gateway's metrics by name and labels, as /metrics has them, `model_name` left out."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60, verify=False) as client:
            text = (await client.get("/metrics")).text
        found = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#"):
                found[name.replace('model_name="tiny",', "").replace(',model_name="tiny"', "")] = float(value)
        return found


def _state(pid: int) -> str:
    """The letter that Linux gives a process's state; "" when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


@contextlib.asynccontextmanager
async def frozen(cluster: ChaosCluster, name: str, seconds: float) -> AsyncIterator[None]:
    """Stop `name` for `seconds`, which are the fault itself."""
    await cluster.freeze(name)
    try:
        yield
        await asyncio.sleep(seconds)
    finally:
        cluster.thaw(name)
