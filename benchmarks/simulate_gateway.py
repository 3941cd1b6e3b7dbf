"""The pure parts of admission and of the planner in a simulation: when a request starts, and which worker has which role.

Both see what the workers said in their last heartbeats.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.simulate_costs import KV_BYTES
from benchmarks.simulate_fleet import Run, Worker
from benchmarks.simulate_trace import TRACE_BLOCK
from common.messages import WorkerState
from gateway.admission import Admission, Capacity, RefusedError, RequestLimits, prefillers
from gateway.admission_queue import Ticket
from gateway.placement import READ
from services.planner.plan import Memory, Observed, PlanSettings, WorkerLoad, plan

TOLD_AFTER_MS = 600.0  # a heartbeat tells of what was sent after so long
CAPACITY_FOR_MS = 50.0  # `gateway.waiting`
WINDOW_MS = 30_000.0  # of what the planner observes: `slo_window_s`


class Gate:
    """One gateway's admission. Requests have to have their first token within their service level."""

    def __init__(self, states: Mapping[str, WorkerState], limits: RequestLimits) -> None:
        self._states = states
        self._admission = Admission(limits)
        self._tickets: dict[Ticket, Run] = {}
        self._sent: deque[tuple[float, Run]] = deque()
        self._seen: tuple[float, Capacity] | None = None

    def offer(self, run: Run, first_token_by_ms: float, now_ms: float) -> bool:
        """Whether the request may wait; if only for `next` to start it at once."""
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
        """Those that may start now. Each has to be `placed` before the next is asked for."""
        if not self._admission.queue:
            return
        capacity = self._capacity(now_ms)
        while (ticket := self._admission.next(capacity)) is not None:
            capacity.unplaced_tokens += ticket.work
            yield self._tickets.pop(ticket)

    def late(self, now_ms: float) -> Iterator[Run]:
        """Those that waited and can't be served in time any more."""
        if self._admission.queue:
            for ticket, _ in self._admission.late(self._capacity(now_ms), now_ms / 1000):
                yield self._tickets.pop(ticket)

    def placed(self, run: Run, work: int, now_ms: float) -> None:
        self._admission.placed(run.id, work)
        self._sent.append((now_ms, run))

    def computed(self, run: Run) -> None:
        self._admission.computed(run.id)

    def ended(self, run: Run) -> None:
        self._admission.ended(run.id, run.request.answer_tokens)

    def _capacity(self, now_ms: float) -> Capacity:
        if self._seen is not None and now_ms - self._seen[0] < CAPACITY_FOR_MS:
            return self._seen[1]
        while self._sent and now_ms - self._sent[0][0] > TOLD_AFTER_MS:
            self._sent.popleft()
        sent = Counter[str]()
        for _, run in self._sent:
            if run.prefill is not None and not run.first_token_ms:
                sent[run.prefill.name] += run.placed_work
        states = self._states.values()
        prefill = [state for state in states if "prefill" in state.roles]
        decode = [state for state in states if "decode" in state.roles]
        queued = {state.worker: state.queued_tokens + sent[state.worker] for state in states}
        self._seen = now_ms, Capacity(workers=prefillers(prefill, decode, local=True, queued=queued))
        return self._seen[1]


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
        self.moves = 0

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
        self.moves += 1
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
        block_read_ms=1000 * TRACE_BLOCK * KV_BYTES / READ,
    )
