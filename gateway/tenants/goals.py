"""The fields in which a client, an administrator or a file of tenants says when an answer is good."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from common.messages import Goal

MIN_GOAL_MS, MAX_GOAL_MS = 0.001, 3_600_000  # an hour
_Milliseconds = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=MIN_GOAL_MS, le=MAX_GOAL_MS)]
_MillisecondsPerToken = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=MAX_GOAL_MS)]


class GoalFields(BaseModel):
    """The parts of a goal, each open unless it is given."""

    ttft_slo_ms: _Milliseconds | None = None
    ttft_slo_ms_per_token: _MillisecondsPerToken | None = None
    tpot_slo_ms: _Milliseconds | None = None

    @property
    def goal(self) -> Goal:
        """The goal as far as it is said."""
        return Goal(ttft_ms=self.ttft_slo_ms, ttft_ms_per_token=self.ttft_slo_ms_per_token, tpot_ms=self.tpot_slo_ms)
