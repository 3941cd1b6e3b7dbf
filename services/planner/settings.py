"""Settings of `baton planner`, and what they mean for its decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from common.settings import OFF, ConfigError, Id, Port, Seconds, Share
from services.runtime.settings import LogOptions, NatsOptions, ServiceLevelOptions

# Imported where they are made: help waits for no client and no gateway.
if TYPE_CHECKING:
    from planner.planner import PlannerConfig


class PlannerOptions(ServiceLevelOptions):
    """How roles are moved. Loads are shares of what the workers of a role can do."""

    plan_period_s: Seconds = Field(2.0, description="time between two decisions")
    plan_hold_s: Annotated[float, Field(ge=0)] = Field(10.0, description="a role must be pressed for so long")
    plan_cooldown_s: Annotated[float, Field(ge=0)] = Field(30.0, description="time between two moves")
    plan_reverse_s: Annotated[float, Field(ge=0)] = Field(60.0, description="time between a move and one back")
    plan_prefill_high: Share = Field(0.9, description="prefill is pressed above this load")
    plan_prefill_low: Share = Field(0.6, description="a prefill worker may leave if the others stay below this load")
    plan_decode_high: Share = Field(0.85, description="decode is pressed above this load")
    plan_decode_low: Share = Field(0.6, description="a decode worker may leave if the others stay below this load")
    plan_attainment: Share = Field(0.95, description="share of requests that should get their service levels")
    plan_dry_run: bool = Field(False, description="decide and say so, but move nobody")
    plan_metrics_port: Annotated[Port, OFF] = Field(
        0, description="port of the planner's Prometheus metrics; off: none"
    )
    plan_metrics_host: str = Field("127.0.0.1", description="address of that port")

    @model_validator(mode="after")
    def _apart(self) -> Self:
        for role in ("prefill", "decode"):
            if getattr(self, f"plan_{role}_low") >= getattr(self, f"plan_{role}_high"):
                raise ConfigError(
                    f"--plan-{role}-low must be below --plan-{role}-high, or roles would go to and fro between two loads"
                )
        return self


class PlannerSettings(NatsOptions, LogOptions, PlannerOptions):
    """`baton planner`: moves workers between prefill and decode by load and service levels."""

    planner_id: Id = Field(
        "", description="name on the bus; empty: made up. Of several planners the smallest name acts"
    )

    def config(self, planner_id: str, incarnation: int) -> PlannerConfig:
        """The decision's settings for this life of the planner of this name."""
        from planner.planner import PlannerConfig
        from planner.settings import PlanSettings

        return PlannerConfig(
            planner_id=planner_id,
            incarnation=incarnation,
            period_s=self.plan_period_s,
            dry_run=self.plan_dry_run,
            plan=PlanSettings(
                horizon_s=self.ttft_slo_ms / 1000,
                hold_s=self.plan_hold_s,
                cooldown_s=self.plan_cooldown_s,
                reverse_s=self.plan_reverse_s,
                prefill_high=self.plan_prefill_high,
                prefill_low=self.plan_prefill_low,
                decode_high=self.plan_decode_high,
                decode_low=self.plan_decode_low,
                step_level_ms=self.tpot_slo_ms,
                attainment=self.plan_attainment,
            ),
        )
