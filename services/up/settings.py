"""Settings of `baton up`: those of the services that it starts, and its own."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings import AUTO_BELOW_0, ROOT, ConfigError, Form
from services.gateway.settings import LOOPBACK, GatewaySettings
from services.planner.settings import PlannerOptions
from services.worker.cores import physical_cores
from services.worker.host_share import HostMB
from services.worker.options import FAKE_DEVICE, WorkerOptions

DEMO = ROOT / "demo"
LAST_PORT = 65_535
Devices = Annotated[
    str,
    Field(pattern=rf"^(cpu|cuda|cuda:\d+(,cuda:\d+)*|{FAKE_DEVICE})$"),
    Form("cpu, cuda, GPUs by number, as cuda:0,cuda:1, or fake"),
]


class UpSettings(GatewaySettings, WorkerOptions, PlannerOptions):
    """`baton up`: everything in one command; what it doesn't use itself goes to the services."""

    device: Devices = Field(
        "cpu",
        description="cpu; cuda: a GPU for each worker, in order; cuda:N,cuda:M,…: dealt out in turn; or a fake device",
    )

    nats_url: str = Field("", description="NATS server, with JetStream; empty: one is started")
    redis_url: str = Field("", description="Redis 7.0+ or Valkey server; empty: one is started")
    prefill: Annotated[int, Field(ge=-1, le=64), AUTO_BELOW_0] = Field(
        -1,
        description="number of prefill workers; auto: 1, but none for a model of yours on a CPU, where the decode worker "
        "prefills, too: the weights are in memory once",
    )
    decode: Annotated[int, Field(ge=1, le=64)] = Field(1, description="number of decode workers")
    gateways: Annotated[int, Field(ge=1, le=16)] = Field(
        1,
        description="number of gateways, which share --port; each also has a port of its own, from --own-port on, by default "
        "from the one after --port",
    )
    planner: bool = Field(False, description="start a planner as well, which moves workers between the roles")
    data_dir: Path = Field(Path(".baton"), description="where logs and server data go")

    def shared_out(self) -> UpSettings:
        """Decide what was left open: prefill workers, their threads and host memory, ports (0: a free one), a key.

        Raises ConfigError.
        """
        from services.runtime.servers import free_port  # help waits for no servers

        on_cpu = self.processor == "cpu"
        port = self.port or free_port()
        own_port = self.own_port or (port + 1 if self.gateways > 1 else 0)
        if own_port + self.gateways - 1 > LAST_PORT:
            raise ConfigError(
                f"--own-port {own_port}: --gateways {self.gateways} need that many ports up to {LAST_PORT}"
            )
        if own_port and own_port <= port < own_port + self.gateways:
            raise ConfigError(f"--own-port {own_port}: --port {port} is among the gateways' own: choose another one")
        for flag, public in (("--ollama-port", self.ollama_port), ("--grpc-port", self.grpc_port)):
            if own_port and own_port <= public < own_port + self.gateways:
                raise ConfigError(f"{flag} {public}: is among the gateways' own ports: choose another one")
        prefill = self.prefill if self.prefill >= 0 else int(not on_cpu or self.model.resolve() == DEMO)
        shared = max(1, physical_cores() // (prefill + self.decode)) if on_cpu else 0
        threads = self.threads or shared
        host = HostMB.parse(self.kv_host_mb).shared_out(prefill + self.decode)
        mine = {"prefill": prefill, "threads": threads, "kv_host_mb": host, "port": port, "own_port": own_port}
        return self.model_copy(update=mine | {"orders_key": self.orders_key or self._own_key()})

    def _own_key(self) -> str:
        """A random 256-bit admin key, if none was given and only this machine can connect; else ""."""
        is_keyless = not (self.keys or self.tenants or self.admin_key) and self.host in LOOPBACK
        return f"baton-{secrets.token_urlsafe(32)}" if is_keyless else ""

    @property
    def own_ports(self) -> tuple[int, ...]:
        """The gateways' own ports; none if there is a single gateway."""
        return tuple(range(self.own_port, self.own_port + self.gateways)) if self.own_port else ()


def devices_of(devices: str, count: int) -> list[str]:
    """Each worker's device: `cuda` is a GPU for each, a list is dealt out in turn."""
    if devices == "cuda":
        return [f"cuda:{index}" for index in range(count)]
    named = devices.split(",")
    return [named[index % len(named)] for index in range(count)]
