"""Settings of `baton up`: those of the services that it starts, and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings import Devices
from services.gateway.settings import GatewaySettings
from services.planner.settings import PlannerOptions
from services.worker.options import WorkerOptions


class UpSettings(GatewaySettings, WorkerOptions, PlannerOptions):
    """`baton up`: everything in one command; what it doesn't use itself goes to the services."""

    device: Devices = Field(
        "cpu",
        description="cpu; cuda: a GPU for each worker, in order; cuda:N,cuda:M,…: dealt out to the workers in turn",
    )

    nats_url: str = Field("", description="NATS server, with JetStream; empty: one is started")
    redis_url: str = Field("", description="Redis 7.0+ or Valkey server; empty: one is started")
    prefill: Annotated[int, Field(ge=0, le=64)] = Field(1, description="number of prefill workers")
    decode: Annotated[int, Field(ge=1, le=64)] = Field(1, description="number of decode workers")
    planner: bool = Field(False, description="start a planner as well, which moves workers between the roles")
    data_dir: Path = Field(Path(".baton"), description="where logs and server data go")
