"""The state of a gateway's feed, with rates derived from its history; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

KEPT_S = 60  # samples, one a second
NEEDED = ("fleet", "figures", "requests")
Json = Mapping[str, Any]


class Rate:
    """A counter's growth a second, sample by sample."""

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=KEPT_S)
        self._last: tuple[float, float] | None = None

    @property
    def now(self) -> float | None:
        """The mean of the last two seconds; None without samples."""
        lately = list(self.samples)[-2:]
        return sum(lately) / len(lately) if lately else None

    def count(self, total: float, at: float) -> None:
        """Take the counter's value at `at`; it may have restarted from 0."""
        if self._last is not None and at > self._last[0]:
            grown = total - self._last[1] if total >= self._last[1] else total
            self.samples.append(grown / (at - self._last[0]))
        self._last = at, total


class State:
    """The newest event of each kind, and the rates computed from them."""

    def __init__(self) -> None:
        self.sections: dict[str, Json] = {}
        self.trouble = ""  # why no events arrive
        self.rates: dict[str, Rate] = {}  # tokens that each worker generates, or pools
        self.busy: dict[str, Rate] = {}  # fraction of time its device ran a pass
        self.fleet_rate = Rate()
        self.in_flight: deque[float] = deque(maxlen=KEPT_S)
        self.ttft: deque[float] = deque(maxlen=KEPT_S)

    @property
    def is_whole(self) -> bool:
        return all(name in self.sections for name in NEEDED)

    def take(self, event: str, told: Json) -> None:
        self.sections[event] = told
        self.trouble = ""

    def sample(self, at: float) -> None:
        """Record the values of a second in the history. `at` is of a monotonic clock."""
        workers = self.section("fleet").get("workers", [])
        self.rates = {worker["id"]: self.rates.get(worker["id"]) or Rate() for worker in workers}
        self.busy = {worker["id"]: self.busy.get(worker["id"]) or Rate() for worker in workers}
        for worker in workers:
            made = worker.get("generated_tokens", 0) + worker.get("pooled_tokens", 0)
            self.rates[worker["id"]].count(made, at)
            self.busy[worker["id"]].count(worker.get("pass_s", 0.0), at)
        generating = [self.rates[worker["id"]] for worker in workers if worker.get("roles") != ["pool"]]
        grown = [rate.samples[-1] for rate in generating if rate.samples]
        if grown:
            self.fleet_rate.samples.append(sum(grown))
        figures = self.section("figures")
        self.in_flight.append(figures.get("in_flight") or 0)
        self.ttft.append((figures.get("latencies") or {}).get("ttft_p50_ms") or 0.0)

    def copy(self) -> State:
        """A snapshot, for a paused picture."""
        held = State()
        held.sections, held.trouble, held.rates = dict(self.sections), self.trouble, deepcopy(self.rates)
        held.busy = deepcopy(self.busy)
        held.fleet_rate, held.in_flight, held.ttft = deepcopy(self.fleet_rate), self.in_flight.copy(), self.ttft.copy()
        return held

    def section(self, name: str) -> Json:
        return self.sections.get(name, {})
