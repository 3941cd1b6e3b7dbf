"""Admission and the planner in a simulation: when a request starts, and which worker has which role.

Both are the real, pure parts. They see the workers' last heartbeats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulate.costs import KV_BYTES
from benchmarks.simulate.fleet import Run, Worker
from benchmarks.simulate.trace import TRACE_BLOCK
from common.messages import WorkerState
from common.policy import kv_read_bytes_per_s
from gateway.admission.policy import Admission, RefusedError, RequestLimits
from gateway.admission.queue import Ticket
from gateway.admission.supply import Capacity, prefillers
from planner.observed import Observed, WorkerLoad
from planner.policy import Memory, plan
from planner.settings import PlanSettings

TOLD_AFTER_MS = 50.0  # a heartbeat includes what was sent this long before
CAPACITY_FOR_MS = 50.0  # `gateway.admission.waiting_room`
WINDOW_MS = 30_000.0  # what the planner observes: `slo_window_s`


class Gate:
    """One gateway's admission. A request that would miss its service level is refused."""

    def __init__(self, states: Mapping[str, WorkerState], limits: RequestLimits) -> None:
        self._states = states
        self._admission = Admission(limits)
        self._tickets: dict[Ticket, Run] = {}
        self._ours: dict[str, dict[Run, float]] = {}  # worker -> requests without a first token, placed when
        self._told: dict[str, _Told] = {}  # worker -> its last heartbeat
        self._seen: tuple[float, Capacity] | None = None

    def offer(self, run: Run, first_token_by_ms: float, now_ms: float) -> bool:
        """Return True if the request is admitted. `start` is called when it may start."""
        ticket = Ticket(
            ids=(run.id,),
            works=(run.request.prompt_tokens,),
            first_token_by=first_token_by_ms / 1000,
            arrived_at=now_ms / 1000,
        )
        try:
            self._admission.offer(ticket, self._capacity(now_ms), now_ms / 1000)
        except RefusedError:
            return False
        self._tickets[ticket] = run
        return True

    def start(self, now_ms: float) -> Iterator[Run]:
        """Requests that may start now. Call `placed` for each before taking the next."""
        if not self._admission.queue:
            return
        capacity = self._capacity(now_ms)
        while (ticket := self._admission.next(capacity)) is not None:
            capacity.unplaced_tokens += ticket.work
            yield self._tickets.pop(ticket)

    def late(self, now_ms: float) -> Iterator[Run]:
        """Requests that waited and can no longer be served in time."""
        if self._admission.queue:
            for ticket, _ in self._admission.late(self._capacity(now_ms), now_ms / 1000):
                yield self._tickets.pop(ticket)

    def placed(self, run: Run, work: int, now_ms: float) -> None:
        self._admission.placed(run.id, work)
        assert run.prefill is not None
        self._ours.setdefault(run.prefill.name, {})[run] = now_ms

    def computed(self, run: Run) -> None:
        self._admission.computed(run.id)
        assert run.prefill is not None
        self._ours[run.prefill.name].pop(run, None)

    def ended(self, run: Run) -> None:
        self._admission.ended(run.id, run.request.answer_tokens)

    def _capacity(self, now_ms: float) -> Capacity:
        if self._seen is not None and now_ms - self._seen[0] < CAPACITY_FOR_MS:
            return self._seen[1]
        states = self._states.values()
        prefill = [state for state in states if "prefill" in state.roles]
        decode = [state for state in states if "decode" in state.roles]
        queued = {state.worker: self._queued(state, now_ms) for state in states}
        self._seen = now_ms, Capacity(workers=prefillers(prefill, decode, local=True, queued=queued))
        return self._seen[1]

    def _queued(self, state: WorkerState, now_ms: float) -> int:
        """As `gateway.admission.capacity`: our prompt tokens there, minus those computed by its last heartbeat."""
        ours, told = self._ours.get(state.worker, {}), self._told.get(state.worker)
        if told is None or told.state is not state:
            known = [run for run, placed_ms in ours.items() if placed_ms < now_ms - TOLD_AFTER_MS]
            longest = max(known, key=lambda run: run.placed_work, default=None)
            computed = max(0, sum(run.placed_work for run in known) - state.queued_tokens)
            told = self._told[state.worker] = _Told(
                state, longest, min(computed, longest.placed_work if longest else 0)
            )
        return sum(run.placed_work for run in ours) - (told.computed if told.longest in ours else 0)


@dataclass(frozen=True, slots=True)
class _Told:
    """Figures derived from a new heartbeat."""

    state: WorkerState
    longest: Run | None  # our longest prompt, taken for the one being computed
    computed: int  # tokens of it that were computed by then


class Roles:
    """The planner's loop."""

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self._memory = Memory()
        self._arrived: deque[tuple[float, int]] = deque()
        self._computed: deque[tuple[float, int, int]] = (
            deque()
        )  # tokens of prompts, those that prefill workers computed
        self._met: deque[tuple[float, bool, bool]] = deque()
        self.moves: list[float] = []  # ms

    def arrived(self, run: Run, now_ms: float) -> None:
        self._arrived.append((now_ms, run.request.prompt_tokens))

    def computed(self, run: Run, now_ms: float) -> None:
        self._computed.append((now_ms, run.request.prompt_tokens, run.uncached if run.decode else 0))

    def ended(self, now_ms: float, *, ttft_met: bool, tpot_met: bool) -> None:
        self._met.append((now_ms, ttft_met, tpot_met))

    def move(self, workers: Sequence[Worker], now_ms: float) -> Worker | None:
        """Change a worker's role, if that helps; return it."""
        for seen in (self._arrived, self._computed, self._met):
            while seen and now_ms - seen[0][0] > WINDOW_MS:
                seen.popleft()
        prompts = sum(tokens for _, tokens, _ in self._computed)
        share = sum(tokens for _, _, tokens in self._computed) / prompts if prompts else 1.0
        observed = Observed(
            workers=tuple(_load_of(worker) for worker in workers),
            handing_over=sum(len(worker.waiting) for worker in workers),
            arriving_tokens_per_s=share * 1000 * sum(tokens for _, tokens in self._arrived) / WINDOW_MS,
            ttft_met=sum(ttft for _, ttft, _ in self._met),
            ttft_count=len(self._met),
            tpot_met=sum(tpot for _, _, tpot in self._met),
            tpot_count=len(self._met),
        )
        decision = plan(now_ms / 1000, observed, self._memory, self._settings)
        self._memory = decision.memory
        if decision.move is None:
            return None
        self.moves.append(now_ms)
        moved = next(worker for worker in workers if worker.name == decision.move.worker)
        moved.roles = list(decision.move.roles)
        return moved


def _load_of(worker: Worker) -> WorkerLoad:
    return WorkerLoad(
        worker=worker.name,
        roles=tuple(worker.roles),
        sequences=len(worker.batch) + len(worker.waiting) if "decode" in worker.roles else 0,
        max_sequences=worker.max_sequences,
        used_blocks=worker.pool.num_used,
        num_blocks=worker.pool.num_blocks,
        queued_tokens=worker.backlog_tokens if "prefill" in worker.roles else 0,
        prefill_tokens_per_s=1000 * worker.prompt_tokens_per_ms,
        decode_step_ms=worker.step_ms,
        block_read_ms=1000 * TRACE_BLOCK * KV_BYTES / kv_read_bytes_per_s(),
    )
