"""Settings of `baton planner`, and their conversion for its policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from common.settings import OFF, Id, Port
from services.runtime.settings import LogOptions, NatsOptions, ServiceLevelOptions

# Imported on use: help waits for no client and no gateway.
if TYPE_CHECKING:
    from planner.planner import PlannerConfig


class PlannerOptions(ServiceLevelOptions):
    """Settings of the planner that `baton up` starts, too."""

    plan_dry_run: bool = Field(False, description="decide and say so, but move nobody")
    plan_metrics_port: Annotated[Port, OFF] = Field(
        0, description="port of the planner's Prometheus metrics; off: none"
    )
    plan_metrics_host: str = Field("127.0.0.1", description="address of that port")


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
