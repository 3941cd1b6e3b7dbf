"""When a role is pressed, and how patient the planner is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Thresholds of pressure, in shares of capacity, and times in seconds."""

    horizon_s: float = 1.0  # waiting prompts should take less: the first token's service level
    hold_s: float = 10.0  # a role must be pressed this long
    cooldown_s: float = 30.0  # between two moves
    reverse_s: float = 60.0  # between a move and one the other way
    prefill_high: float = 0.9  # pressed above this
    prefill_low: float = 0.6  # a worker leaves only if the others stay below this
    decode_high: float = 0.85
    decode_low: float = 0.6
    step_level_ms: float = 50.0  # the service level of the time per token
    least_load: float = 0.5  # below it more workers would not help a missed service level
    least_gain: float = 0.05  # the larger pressure must fall by this share
    attainment: float = 0.95  # share of requests that should meet a service level
    least_samples: int = 10  # fewer requests say nothing about a service level

    def __post_init__(self) -> None:
        if not (0 < self.prefill_low < self.prefill_high and 0 < self.decode_low < self.decode_high):
            raise ValueError("each low threshold must be above 0 and below its high one, or roles would go to and fro")
        if self.step_level_ms <= 0:
            raise ValueError(f"step_level_ms must be above 0, it is {self.step_level_ms:g}")
