"""One simulation: a trace's requests, a fleet, a policy, and the outcome."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from benchmarks.simulate.costs import prefill_ms, step_ms, transfer_ms
from benchmarks.simulate.fleet import Run, Worker
from benchmarks.simulate.gateway import Gate, Roles
from benchmarks.simulate.policies import Policy
from benchmarks.simulate.regret import regret_ms
from benchmarks.simulate.trace import TRACE_BLOCK, TraceRequest

TTFT_SLO_MS, TTFT_SLO_TOKEN_MS, TPOT_SLO_MS = 1000.0, 0.5, 20.0
HEARTBEAT_MS, ANNOUNCE_MS = 500.0, 100.0  # `worker.heartbeat`
LONG_PROMPT, TAIL = 4096, 256  # tokens pushed after a long prompt's prefill: `prefill.scheduler`

GATE_MS, PLAN_MS = 100.0, 1000.0  # pauses between looks at waiting requests, and at roles

MOST_REGRETTED = 64  # regret is computed in fleets up to this size

Event = Literal["arrival", "worker", "heartbeat", "announce", "joins", "gate", "plan"]


@dataclass(slots=True)
class Outcome:
    """The result of one policy on one load."""

    policy: str
    runs: list[Run]
    workers: list[Worker]
    place_ms: list[float] = field(default_factory=list)
    moves: tuple[float, ...] = ()  # when roles moved, ms
    regrets_ms: list[float] = field(default_factory=list)  # one a placement, in small fleets

    @property
    def refused(self) -> int:
        return len(self.runs) - len(self.served)

    @property
    def span_s(self) -> float:
        return max(run.request.arrival_ms for run in self.runs) / 1000

    @property
    def served(self) -> list[Run]:
        return [run for run in self.runs if not run.refused]

    @property
    def good(self) -> int:
        return sum(map(meets_slo, self.runs))

    @property
    def goodput(self) -> float:
        """Requests a second of the trace's time that met the SLO."""
        return self.good / self.span_s

    @property
    def hit_rate(self) -> float:
        """Share of the served prompts' tokens that were cached where they were computed."""
        return sum(run.cached_tokens for run in self.served) / max(1, sum(r.request.prompt_tokens for r in self.served))

    @property
    def imbalance(self) -> float:
        """The busiest prefill worker's time by the mean one's."""
        busy = [worker.busy_ms for worker in self.workers if "prefill" in worker.roles]
        return max(busy) * len(busy) / max(sum(busy), 1e-9) if busy else 1.0

    @property
    def reasons(self) -> Counter[str]:
        return Counter(run.reason for run in self.served)

    def ttft_ms(self, quantile: float) -> float:
        return percentile([run.ttft_ms for run in self.served], quantile)

    def regret_ms(self, quantile: float) -> float:
        return percentile(self.regrets_ms, quantile)

    @property
    def mean_regret_ms(self) -> float:
        return sum(self.regrets_ms) / max(1, len(self.regrets_ms))

    def tpot_ms(self, quantile: float) -> float:
        return percentile([run.tpot_ms for run in self.served], quantile)


def percentile(values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least this share of all values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0


def ttft_slo_ms(request: TraceRequest) -> float:
    """The service level of TTFT."""
    return TTFT_SLO_MS + TTFT_SLO_TOKEN_MS * request.prompt_tokens


def meets_slo(run: Run) -> bool:
    """True if TTFT and TPOT met their service levels."""
    return not run.refused and run.ttft_ms <= ttft_slo_ms(run.request) and run.tpot_ms <= TPOT_SLO_MS


class Simulation:
    """Runs until every request has ended."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        workers: list[Worker],
        policy: Policy,
        *,
        gate: Gate | None = None,
        roles: Roles | None = None,
    ) -> None:
        """Without `gate` every request starts at once; without `roles` no worker changes its role."""
        self._runs = [Run(id=f"r{number}", request=request) for number, request in enumerate(requests)]
        self._workers, self._policy = workers, policy
        self._gate, self._roles = gate, roles
        self._events: list[tuple[float, int, Event, object, int]] = []
        self._order = count()
        self._left = len(self._runs)
        self._announcing: set[Worker] = set()
        self._may_start = False
        self._regrets_ms: list[float] = []

    def run(self) -> Outcome:
        for run in self._runs:
            self._at(run.request.arrival_ms, "arrival", run)
        if self._policy.listens:
            for number, worker in enumerate(self._workers):
                self._at(HEARTBEAT_MS * (number + 1) / len(self._workers), "heartbeat", worker)
        if self._gate is not None:
            self._at(GATE_MS, "gate", None)
        if self._roles is not None:
            self._at(PLAN_MS, "plan", None)
        while self._left:
            now_ms, _, event, subject, version = heapq.heappop(self._events)
            if isinstance(subject, Worker):
                if event == "worker" and version != subject.version:
                    continue
                self._worker_event(event, subject, now_ms)
            elif isinstance(subject, Run):
                self._arrives(subject, now_ms) if event == "arrival" else self._joins(subject, now_ms)
            elif event == "gate":
                self._look_again(now_ms)
            else:
                self._plan(now_ms)
            if self._may_start:
                self._start_waiting(now_ms)
        moves = tuple(self._roles.moves) if self._roles else ()
        place_ms = getattr(self._policy, "place_ms", [])
        return Outcome(self._policy.name, self._runs, self._workers, place_ms, moves, self._regrets_ms)

    def _at(self, time_ms: float, event: Event, subject: object, version: int = 0) -> None:
        heapq.heappush(self._events, (time_ms, next(self._order), event, subject, version))

    def _arrives(self, run: Run, now_ms: float) -> None:
        if self._roles is not None:
            self._roles.arrived(run, now_ms)
        if self._gate is None:
            self._start(run, now_ms)
        elif self._gate.offer(run, run.request.arrival_ms + ttft_slo_ms(run.request), now_ms):
            self._may_start = True
        else:
            self._refuse(run)

    def _start(self, run: Run, now_ms: float) -> None:
        self._policy.place(run, now_ms)
        assert run.prefill is not None
        if len(self._workers) <= MOST_REGRETTED:
            self._regrets_ms.append(regret_ms(run, self._workers, now_ms))
        run.prefill.advance(now_ms)
        run.prefill.enqueue(run)
        self._go_on(run.prefill, now_ms)

    def _start_waiting(self, now_ms: float) -> None:
        self._may_start = False
        assert self._gate is not None
        for run in self._gate.start(now_ms):
            self._start(run, now_ms)
            self._gate.placed(run, run.placed_work, now_ms)

    def _refuse(self, run: Run) -> None:
        run.refused = True
        self._left -= 1

    def _look_again(self, now_ms: float) -> None:
        assert self._gate is not None
        for run in self._gate.late(now_ms):
            self._refuse(run)
        self._may_start = True
        self._at(now_ms + GATE_MS, "gate", None)

    def _plan(self, now_ms: float) -> None:
        assert self._roles is not None
        for worker in self._workers:
            worker.advance(now_ms)
        moved = self._roles.move(self._workers, now_ms)
        if moved is not None:
            self._policy.heartbeat(moved)
        self._at(now_ms + PLAN_MS, "plan", None)

    def _worker_event(self, event: Event, worker: Worker, now_ms: float) -> None:
        worker.advance(now_ms)
        if event == "heartbeat":
            self._policy.heartbeat(worker)
            self._at(now_ms + HEARTBEAT_MS, "heartbeat", worker)
        elif event == "announce":
            self._announcing.discard(worker)
            self._policy.announce(worker)
        else:
            self._go_on(worker, now_ms)

    def _go_on(self, worker: Worker, now_ms: float) -> None:
        """End what is over, begin what can begin, and schedule the worker's next event."""
        computed, ended = worker.step_over()
        for run in ended:
            self._ends(run, worker, now_ms)
        if computed is not None:
            self._first_token(computed, worker, now_ms)
        wait_ms, joined = worker.settle()
        for run in joined:
            self._accepted(run, worker, now_ms)
        if wait_ms != float("inf"):
            self._at(now_ms + wait_ms, "worker", worker, worker.version)
        if self._policy.listens and (computed or ended or joined) and worker not in self._announcing:
            self._announcing.add(worker)
            self._at(now_ms + ANNOUNCE_MS, "announce", worker)

    def _first_token(self, run: Run, worker: Worker, now_ms: float) -> None:
        run.first_token_ms = now_ms
        self._policy.computed(run)
        if self._gate is not None:
            self._gate.computed(run)
            self._may_start = True
        if self._roles is not None:
            self._roles.computed(run, now_ms)
        if run.request.answer_tokens == 1:
            self._ends(run, worker, now_ms)
        elif run.decode:
            tail = TAIL if run.uncached > LONG_PROMPT else run.uncached
            self._at(now_ms + transfer_ms(tail), "joins", run)
        else:
            worker.join(run)

    def _joins(self, run: Run, now_ms: float) -> None:
        worker = next((worker for worker in run.decode if worker.has_room(run)), run.decode[0])
        worker.advance(now_ms)
        if worker.join(run):
            self._accepted(run, worker, now_ms)
        self._go_on(worker, now_ms)

    def _accepted(self, run: Run, worker: Worker, now_ms: float) -> None:
        """A decode worker has the sequence: only now does the sender free its blocks."""
        sender = run.prefill
        if sender is not None and sender is not worker:
            sender.advance(now_ms)
            sender.free(run)
            if sender.prompts:
                self._go_on(sender, now_ms)  # one that found no blocks may begin

    def _ends(self, run: Run, worker: Worker, now_ms: float) -> None:
        run.end_ms = now_ms
        worker.free(run)
        self._policy.ended(run)
        self._left -= 1
        if self._gate is not None:
            self._gate.ended(run)
            self._may_start = True
        if self._roles is not None:
            ttft_met, tpot_met = run.ttft_ms <= ttft_slo_ms(run.request), run.tpot_ms <= TPOT_SLO_MS
            self._roles.ended(now_ms, ttft_met=ttft_met, tpot_met=tpot_met)


def ideal(requests: Sequence[TraceRequest]) -> Outcome:
    """No queue, no interference, one infinite cache that everybody shares at no cost."""
    seen: set[bytes] = set()
    runs = []
    for number, request in enumerate(requests):
        run = Run(id=f"r{number}", request=request)
        blocks = request.blocks
        matched = next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        run.cached_tokens = min(matched * TRACE_BLOCK, request.prompt_tokens - 1)
        run.first_token_ms = request.arrival_ms + prefill_ms(run.cached_tokens, run.uncached)
        step = step_ms(1, request.prompt_tokens + request.answer_tokens / 2)
        run.end_ms = run.first_token_ms + (request.answer_tokens - 1) * step
        runs.append(run)
    return Outcome("ideal", runs, [])
