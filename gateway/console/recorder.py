"""The recorder of this gateway's console data, running always: recent measurements in ring buffers, events, decisions.

Durations are counted in classes that grow by a twentieth, so those of several gateways add up and a percentile is right to 3 %.
`counts` and `times` are of one gateway's requests, `levels` of one gateway at the instants of its looks; `fleet` is what every
gateway hears of all workers.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.messages import GatewayState, PlannerState, WorkerState
from gateway.console.chronicle import Chronicle, Heard
from gateway.console.decisions import Decisions
from gateway.console.state import worker_json
from gateway.request.refused import Refusals
from gateway.request.spec import Generations
from gateway.request.timeline import Timeline

SPANS = {"10m": (2, 300), "1h": (10, 360), "6h": (60, 360)}  # seconds of a sample, number of samples
LEAST_MS, MOST_MS = 0.1, 1e6
_GROWTH = math.log(1.05)
RATES = ("ended", "good", "errors", "cancelled", "refused", "invalid", "prompt_tokens", "handovers", "moved_bytes")
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TIMES = ("ttft", "tpot")

Json = dict[str, Any]
Sums = defaultdict[str, float]


def _none() -> Sums:
    return defaultdict(float)


def _add(sums: Sums, amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        sums[name] += amount


def class_of(milliseconds: float) -> int:
    return int(math.log(min(MOST_MS, max(LEAST_MS, milliseconds)) / LEAST_MS) / _GROWTH)


def milliseconds_of(place: int) -> float:
    return LEAST_MS * math.exp(_GROWTH * (place + 0.5))


@dataclass(slots=True)
class Sample:
    """The measurements of an interval that starts at `at` (unix)."""

    at: int
    counts: Sums = field(default_factory=_none)
    times: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in TIMES})
    levels: Sums = field(default_factory=_none)  # summed over its looks
    fleet: Sums = field(default_factory=_none)
    looks: int = 0

    def as_json(self) -> Json:
        looks = max(1, self.looks)
        return {
            "at": self.at,
            "counts": dict(self.counts),
            **{name: {str(place): count for place, count in self.times[name].items()} for name in TIMES},
            "levels": {name: round(value / looks, 4) for name, value in self.levels.items()},
            "fleet": {name: round(value / looks, 4) for name, value in self.fleet.items()} if self.looks else None,
        }


class History:
    """The rings of one gateway."""

    def __init__(self) -> None:
        self._rings: dict[str, deque[Sample]] = {span: deque(maxlen=length) for span, (_, length) in SPANS.items()}

    def count(self, unix: float, **amounts: float) -> None:
        for sample in self._samples(unix):
            _add(sample.counts, amounts)

    def time(self, unix: float, name: str, milliseconds: float) -> None:
        place = class_of(milliseconds)
        for sample in self._samples(unix):
            sample.times[name][place] += 1

    def look(self, unix: float, levels: Mapping[str, float], fleet: Mapping[str, float]) -> None:
        """Add the present state to the current samples."""
        for sample in self._samples(unix):
            _add(sample.levels, levels)
            _add(sample.fleet, fleet)
            sample.looks += 1

    def as_json(self, span: str, since: float = 0) -> list[Json]:
        """The samples that began after `since`."""
        return [sample.as_json() for sample in self._rings[span] if sample.at > since]

    def _samples(self, unix: float) -> Iterable[Sample]:
        for span, ring in self._rings.items():
            step_s = SPANS[span][0]
            at = int(unix // step_s) * step_s
            if not ring or ring[-1].at < at:  # a clock set back continues with the newest
                ring.append(Sample(at))
            yield ring[-1]


def merged_history(parts: Mapping[str, Sequence[Json]], span: str, unix: float, since: float = 0) -> Json:
    """Columns over all gateways: complete samples, from the first one after `since`. `parts`: gateway -> its samples, our own
    first."""
    step_s, length = SPANS[span]
    last = int(unix // step_s) * step_s - step_s
    by_time: dict[int, list[Json]] = {}
    for samples in parts.values():
        for sample in samples:
            by_time.setdefault(sample["at"], []).append(sample)
    first = min((at for at in by_time if at > max(since, last - length * step_s)), default=last + 1)
    instants = list(range(first, last + 1, step_s))
    rows = [_row(by_time.get(at, []), step_s) for at in instants]
    names = sorted({name for row in rows for name in row})
    return {
        "span": span,
        "step_s": step_s,
        "length": length,
        "at": instants,
        "series": {name: [row.get(name) for row in rows] for name in names},
        "gateways": {name: sum(one["counts"].get("ended", 0) for one in samples) for name, samples in parts.items()},
    }


def _row(samples: Sequence[Json], seconds: float) -> dict[str, float | None]:
    """One instant's values, rates per second; null without a sample."""
    if not samples:
        return {}
    counts, levels = _none(), _none()
    for sample in samples:
        _add(counts, sample["counts"])
        _add(levels, sample["levels"])
    row: dict[str, float | None] = {name: round(counts[name] / seconds, 3) for name in RATES}
    row["cached"] = round(counts["cached_tokens"] / counts["prompt_tokens"], 4) if counts["prompt_tokens"] else None
    row["goodput"] = round(counts["good"] / counts["judged"], 4) if counts["judged"] else None
    row |= {name: round(value, 3) for name, value in levels.items()}
    row |= next((sample["fleet"] for sample in samples if sample.get("fleet")), {})
    for name in TIMES:
        classes = Counter[int]()
        for sample in samples:
            classes.update({int(place): count for place, count in sample[name].items()})
        row |= {f"{name}_{label}": percentile_of(classes, share) for label, share in PERCENTILES.items()}
    return row


def percentile_of(classes: Counter[int], share: float) -> float | None:
    """The middle of the class in which `share` of the durations are reached, in milliseconds."""
    left = share * classes.total()
    for place in sorted(classes):
        left -= classes[place]
        if left <= 1e-9:
            return round(milliseconds_of(place), 3)
    return None


LOOK_EVERY_S = 1.0
_COUNTED = {"error": "errors", "cancelled": "cancelled"}


class Recorder:
    """`ended` is called for each request, `look` every LOOK_EVERY_S."""

    def __init__(
        self,
        generations: Generations,
        refusals: Refusals,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._generations = generations
        self._refusals = refusals
        self._clock, self._wall = clock, wall
        self._looked_at = clock()
        self._refused_before = dict[str, int]()
        self._generated = dict[tuple[str, int], int]()  # tokens of each worker at the last look
        self.history = History()
        self.chronicle = Chronicle()
        self.decisions = Decisions()
        generations.timelines.on_end(self.ended)

    def ended(self, line: Timeline) -> None:
        """Record an ended request."""
        unix, per_token = self._wall(), line.tpot_ms
        counts: dict[str, float] = {_COUNTED.get(line.status, "ended"): 1}
        if line.status != "cancelled" and not line.patient:
            counts |= {"judged": 1, "good": line.ttft_ms is not None and not line.missed}
        self.history.count(unix, **counts)
        if per_token is not None:
            self.history.time(unix, "tpot", per_token)
        for attempt in line.attempts:
            if attempt.imported is not None:
                self.history.count(unix, handovers=1, moved_bytes=attempt.imported.transferred_bytes)
        self._first_token(line, unix)

    def saw_planner(self, state: PlannerState) -> None:
        self.decisions.saw(state, self._wall())

    def look(self, workers: Iterable[WorkerState], gateways: Iterable[GatewayState]) -> None:
        """Record the present state."""
        unix, states, generations = self._wall(), list(workers), self._generations
        for line in generations.timelines.since(float("inf")):  # running
            self._first_token(line, unix)
        self._looked_at = self._clock()
        refused = dict(self._refusals.counts)
        self.history.count(unix, **{name: n - self._refused_before.get(name, 0) for name, n in refused.items()})
        self._refused_before = refused
        waiting = sum(requests for requests, _ in generations.waiting.values())
        levels = {"in_flight": generations.in_flight, "waiting": waiting}
        self.history.look(unix, levels, self._fleet(states) | self._planned(unix))
        newest = self._refusals.last_for_want_of_room
        heard = Heard(
            workers={state.worker: worker_json(state) for state in states},
            gateways=frozenset(state.gateway for state in gateways),
            not_ready=generations.not_ready_reason,
            refused=refused.get("refused", 0),
            refused_why=newest.detail if newest is not None else "",
        )
        self.chronicle.look(heard, unix)

    def _first_token(self, line: Timeline, unix: float) -> None:
        """Count a first token if it came after the last look."""
        if line.first_token_at is None or line.ttft_ms is None or line.first_token_at <= self._looked_at:
            return
        self.history.time(unix, "ttft", line.ttft_ms)
        self.history.count(unix, prompt_tokens=line.prompt_tokens, cached_tokens=line.cached_tokens)

    def _fleet(self, states: list[WorkerState]) -> dict[str, float]:
        generated = {(state.worker, state.incarnation): state.totals.generated_tokens for state in states}
        new = sum(max(0, total - self._generated.get(one, total)) for one, total in generated.items())
        self._generated = generated
        used = [
            (state.region.layout.num_blocks - state.free_blocks, state.region.layout.num_blocks) for state in states
        ]
        blocks = sum(whole for _, whole in used)
        return {
            "generated_per_s": new / LOOK_EVERY_S,
            "kv": sum(part for part, _ in used) / blocks if blocks else 0.0,
            "kv_fullest": max((part / whole for part, whole in used if whole), default=0.0),
            "running": sum(state.running for state in states),
            "queued": sum(state.waiting for state in states),
            "to_prefill": sum(state.queued_tokens for state in states),
            "workers": len(states),
        }

    def _planned(self, unix: float) -> dict[str, float]:
        """The active planner's figures about roles; empty without one."""
        told: dict[str, Any] = next(iter(self.decisions.planners(unix)), {})
        return {
            f"{name}_{role}": value
            for name, field in (("desired", "desired"), ("pressure", "pressures"), ("has", "workers"))
            for role, value in told.get(field, {}).items()
        }
