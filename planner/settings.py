"""Thresholds of the planner: when a role is pressed, and how long to wait between moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Thresholds of pressure, as shares of capacity, and times in seconds."""

    horizon_s: float = 1.0  # waiting prompts should take less: the service level of TTFT
    hold_s: float = 10.0  # how long a role must be pressed
    cooldown_s: float = 30.0  # between two moves
    reverse_s: float = 60.0  # between a move and one the other way
    prefill_high: float = 0.9  # pressed above this
    prefill_low: float = 0.6  # a worker leaves only if the rest stay below this
    decode_high: float = 0.85
    decode_low: float = 0.6
    step_level_ms: float = 50.0  # the service level of time per output token
    least_load: float = 0.5  # below this load more workers can't fix a missed service level
    least_gain: float = 0.05  # minimum relative drop of the larger pressure
    attainment: float = 0.95  # share of requests that should meet a service level
    least_samples: int = 10  # fewer requests prove nothing about a service level

    def __post_init__(self) -> None:
        if not (0 < self.prefill_low < self.prefill_high and 0 < self.decode_low < self.decode_high):
            raise ValueError("each low threshold must be above 0 and below its high one, or roles would go to and fro")
        if self.step_level_ms <= 0:
            raise ValueError(f"step_level_ms must be above 0, it is {self.step_level_ms:g}")
