"""Settings of `baton planner`, and their conversion for its policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from common.settings import Form, Id
from services.runtime.settings import LogOptions, NatsOptions, ServiceLevelOptions

MAX_PORT = 65_535

# Imported on use: help waits for no client and no gateway.
if TYPE_CHECKING:
    from planner.planner import PlannerConfig


def _has_port(address: str) -> str:
    """The address itself. Raises ValueError for a port that there isn't."""
    port = address.rpartition(":")[2]
    if port and not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"port {port} isn't one of 1 to {MAX_PORT}")
    return address


class PlannerOptions(ServiceLevelOptions):
    """Settings of the planner that `baton up` starts, too."""

    plan_dry_run: bool = Field(False, description="decide and say so, but move nobody")
    plan_metrics: Annotated[
        str,
        Field(pattern=r"^([^\s:]+|\[[0-9a-fA-F:.]+\]):\d{1,5}$|^$"),
        AfterValidator(_has_port),
        Form("an address and a port, as 127.0.0.1:9101"),
    ] = Field("", description="where the planner serves Prometheus metrics, as 127.0.0.1:9101; empty: nowhere")


class PlannerSettings(NatsOptions, LogOptions, PlannerOptions):
    """`baton planner`: moves workers between prefill and decode by load and service levels."""

    planner_id: Id = Field(
        "", description="name on the bus; empty: made up. Of several planners the smallest name acts"
    )

    def config(self, planner_id: str, incarnation: int) -> PlannerConfig:
        """The planner's configuration for this incarnation."""
        from planner.planner import PlannerConfig
        from planner.settings import PlanSettings

        return PlannerConfig(
            planner_id=planner_id,
            incarnation=incarnation,
            dry_run=self.plan_dry_run,
            plan=PlanSettings(horizon_s=self.ttft_slo_ms / 1000, step_level_ms=self.tpot_slo_ms),
        )
