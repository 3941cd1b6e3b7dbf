"""The steps of a run: a single load, a sweep, or a search for the highest rate within the objectives; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cli.bench.settings import BenchSettings
from common.settings import ConfigError

STEP_S = 15.0  # duration of a step at a rate
MIN_REQUESTS = 20  # minimum requests of a step at a rate
REQUESTS_A_PLACE = 4  # requests of a step at a concurrency, for each slot
MAX_STEPS = 64
MAX_PROBES = 24
PRECISION = 0.05  # the search ends when its bounds are this close
MAX_RATE, MIN_RATE = 1e6, 1e-3
SEED_STEP = 7919


@dataclass(frozen=True, slots=True)
class Step:
    """One load of a run."""

    rate: float = 0.0  # requests a second; 0: no limit
    concurrency: int = 0

    def __str__(self) -> str:
        if self.rate:
            return f"{self.rate:.4g} requests/s" + (f", {self.concurrency} in flight" if self.concurrency else "")
        return f"{self.concurrency} in flight" if self.concurrency else "all at once"


def steps_of(settings: BenchSettings) -> list[Step]:
    """Steps known before the run. Raises ConfigError."""
    _check(settings)
    if not settings.sweep or settings.finds_max:
        return [Step(settings.request_rate, settings.max_concurrency)]
    kind, equals, text = settings.sweep.partition("=")
    kind, text = (kind, text) if equals else ("rate", kind)
    if kind not in ("rate", "concurrency"):
        raise ConfigError(f"--sweep {settings.sweep}: rate=…, concurrency=… or max")
    loads = _loads(text, settings.sweep)
    if kind == "rate":
        return [Step(load, settings.max_concurrency) for load in loads]
    return [Step(settings.request_rate, max(1, round(load))) for load in loads]


def of_step(settings: BenchSettings, step: Step) -> BenchSettings:
    """The settings of one step: its load and number of requests."""
    changed: dict[str, float] = {"request_rate": step.rate, "max_concurrency": step.concurrency}
    if settings.sweep and "num_prompts" not in settings.model_fields_set:
        by_time = math.ceil(step.rate * STEP_S) if step.rate else REQUESTS_A_PLACE * step.concurrency
        changed["num_prompts"] = max(MIN_REQUESTS, by_time)
    return settings.model_copy(update=changed)


def seed_of(settings: BenchSettings, index: int) -> int:
    """Return the seed of a step's prompts: with a shared seed the second step would hit the first one's prefix cache."""
    return settings.seed + SEED_STEP * index


class MaxSearch:
    """A search for the highest rate that meets the objectives.

    Doubles the rate until one misses them, or halves it until one meets them; then takes the geometric middle of the
    highest that met and the lowest that missed, until these are within `PRECISION`. It ends where one request alone
    missed: no lower rate can do better.
    """

    def __init__(self, begin: float) -> None:
        self.met = 0.0
        self.missed = math.inf
        self.misses_alone = False  # missed even without concurrent requests
        self._next = begin or 1.0
        self._probes = 0

    @property
    def rate(self) -> float | None:
        """The next rate to try; None when the search is over."""
        return self._next or None

    def took(self, rate: float, *, met: bool, alone: bool = False) -> None:
        """Record a tried rate. `alone`: no two of its requests were in flight at once."""
        self._probes += 1
        self.misses_alone |= alone and not met
        if met:
            self.met = max(self.met, rate)
        else:
            self.missed = min(self.missed, rate)
        self._next = 0.0 if self._is_over() else self._middle()

    def _is_over(self) -> bool:
        near = self.met > 0 and self.missed <= self.met * (1 + PRECISION)
        return (
            self.misses_alone or near or self._probes >= MAX_PROBES or self.met >= MAX_RATE or self.missed <= MIN_RATE
        )

    def _middle(self) -> float:
        if math.isinf(self.missed):
            return self.met * 2
        return math.sqrt(self.met * self.missed) if self.met else self.missed / 2


def _check(settings: BenchSettings) -> None:
    _ = settings.slo_share  # is checked now
    if settings.finds_max and not settings.has_objectives:
        raise ConfigError("--sweep max needs an objective: --ttft-slo-ms, --tpot-slo-ms or --e2e-slo-ms")
    if settings.finds_max and settings.max_concurrency:
        raise ConfigError("--sweep max with --max-concurrency would hide the wait for a place: leave one out")


def _loads(text: str, said: str) -> list[float]:
    try:
        if ":" in text:
            low, high, count = text.split(":")
            loads = _geometric(float(low), float(high), int(count))
        else:
            loads = [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--sweep {said}: numbers as `1,2,4`, or `1:16:5` for 5 of them from 1 to 16") from None
    if not all(0 < load <= MAX_RATE for load in loads) or len(loads) > MAX_STEPS:
        raise ConfigError(f"--sweep {said}: up to {MAX_STEPS} loads above 0")
    return loads


def _geometric(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from `low` to `high` in geometric progression. Raises ValueError."""
    if not 0 < low < high or not 2 <= count <= MAX_STEPS:
        raise ValueError
    return [float(f"{low * (high / low) ** (index / (count - 1)):.4g}") for index in range(count)]
