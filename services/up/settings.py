"""Settings of `baton up`: those of the services that it starts, and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings import AUTO_BELOW_0, ROOT, Devices
from services.gateway.settings import GatewaySettings
from services.planner.settings import PlannerOptions
from services.worker.cores import physical_cores
from services.worker.options import WorkerOptions

DEMO = ROOT / "demo"


class UpSettings(GatewaySettings, WorkerOptions, PlannerOptions):
    """`baton up`: everything in one command; what it doesn't use itself goes to the services."""

    device: Devices = Field(
        "cpu",
        description="cpu; cuda: a GPU for each worker, in order; cuda:N,cuda:M,…: dealt out to the workers in turn",
    )

    nats_url: str = Field("", description="NATS server, with JetStream; empty: one is started")
    redis_url: str = Field("", description="Redis 7.0+ or Valkey server; empty: one is started")
    prefill: Annotated[int, Field(ge=-1, le=64), AUTO_BELOW_0] = Field(
        -1,
        description="number of prefill workers; auto: 1, but none for a model of yours on a CPU, where the decode worker "
        "prefills, too: the weights are in memory once",
    )
    decode: Annotated[int, Field(ge=1, le=64)] = Field(1, description="number of decode workers")
    planner: bool = Field(False, description="start a planner as well, which moves workers between the roles")
    data_dir: Path = Field(Path(".baton"), description="where logs and server data go")

    def shared_out(self) -> UpSettings:
        """Decide what was left to the machine: how many prefill workers, and each worker's threads."""
        on_cpu = self.device == "cpu"
        prefill = self.prefill if self.prefill >= 0 else int(not on_cpu or self.model.resolve() == DEMO)
        shared = max(1, physical_cores() // (prefill + self.decode)) if on_cpu else 0
        return self.model_copy(update={"prefill": prefill, "threads": self.threads or shared})
