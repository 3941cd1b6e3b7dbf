"""The recorder of this gateway's console data, running always: history, events, decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from common.messages import GatewayState, PlannerState, WorkerState
from gateway.console.chronicle import Chronicle, Heard
from gateway.console.decisions import Decisions
from gateway.console.history import History
from gateway.console.state import tpot_ms, worker_json
from gateway.observe.attainment import ServiceLevels
from gateway.request.refused import Refusals
from gateway.request.spec import Generations
from gateway.request.timeline import Timeline

LOOK_EVERY_S = 1.0
_COUNTED = {"error": "errors", "cancelled": "cancelled"}


class Recorder:
    """`ended` is called for each request, `look` every LOOK_EVERY_S."""

    def __init__(
        self,
        generations: Generations,
        refusals: Refusals,
        levels: ServiceLevels,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._generations = generations
        self._refusals = refusals
        self._levels = levels
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
        unix, per_token = self._wall(), tpot_ms(line)
        counts: dict[str, float] = {_COUNTED.get(line.status, "ended"): 1}
        if line.status != "cancelled" and not line.patient:
            counts |= {"judged": 1, "good": self._is_good(line, per_token)}
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

    def _is_good(self, line: Timeline, per_token: float | None) -> bool:
        """True if it met both service levels."""
        if line.status == "error" or line.ttft_ms is None:
            return False
        in_time = line.ttft_ms <= 1000 * self._levels.ttft_s
        return in_time and (per_token is None or per_token <= 1000 * self._levels.tpot_s)

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
