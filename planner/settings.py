"""Thresholds of the planner: when a role is pressed, and how long to wait between moves."""

from __future__ import annotations

from dataclasses import dataclass

from common.words import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A role's thresholds: pressed above `high`, and a worker leaves only if the rest stay below `low`. Raises ValueError."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError("each low threshold must be above 0 and below its high one, or roles would go to and fro")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Thresholds of pressure, as shares of capacity, and times in seconds."""

    horizon_s: float = 1.0  # waiting prompts should take less: the service level of TTFT
    hold_s: float = 10.0  # how long a role must be pressed
    cooldown_s: float = 30.0  # between two moves
    reverse_s: float = 60.0  # between a move and one the other way
    prefill: Band = Band(low=0.6, high=0.9)
    decode: Band = Band(low=0.6, high=0.85)
    step_level_ms: float = 50.0  # the service level of time per output token
    least_load: float = 0.5  # below this load more workers can't fix a missed service level
    least_gain: float = 0.05  # minimum relative drop of the larger pressure
    attainment: float = 0.95  # share of requests that should meet a service level
    least_samples: int = 10  # fewer requests prove nothing about a service level

    def __post_init__(self) -> None:
        if self.step_level_ms <= 0:
            raise ValueError(f"step_level_ms must be above 0, it is {self.step_level_ms:g}")

    def band_of(self, role: Role) -> Band:
        """The thresholds of a role's pressure."""
        return self.prefill if role == Role.PREFILL else self.decode
