"""A gateway's admission before a modelled worker: the real policy, which knows the worker by heartbeats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.load.device import MAX_SEQUENCES
from benchmarks.load.model import Run, Worker
from common.messages import NO_GOAL
from decode.request import DecodeRequest
from gateway.admission.policy import Admission, RefusedError, RequestLimits
from gateway.admission.queue import Ticket
from gateway.admission.supply import Capacity, Places, Prefiller

HEARTBEAT_S = 0.5
DEADLINE_S = 600.0


@dataclass(slots=True)
class Gateway:
    """One gateway: requests that wait in it, and what the worker said last."""

    by_goals: bool  # `--admit-by goal`
    admission: Admission = field(default_factory=lambda: Admission(RequestLimits(max_requests=1_000_000)))
    _waiting: dict[Ticket, tuple[DecodeRequest, Run]] = field(default_factory=dict)
    _computing: dict[str, int] = field(default_factory=dict)  # started requests' prompt tokens
    _told_at: float = -math.inf
    _tokens_per_s: float = 0.0
    _computed: int = 0  # tokens of `_computing` that the worker had computed by then

    def offer(self, request: DecodeRequest, run: Run, worker: Worker) -> None:
        prompt_tokens, goal = run.request.prompt_tokens, run.goal if self.by_goals else NO_GOAL
        ticket = Ticket(
            ids=(request.id,),
            works=(prompt_tokens,),
            first_token_by=worker.now + DEADLINE_S,
            begin_by=worker.now + goal.ttft_s(0),
            good_by=worker.now + goal.ttft_s(prompt_tokens),
            arrived_at=worker.now,
        )
        try:
            self.admission.offer(ticket, self._capacity(worker), worker.now)
        except RefusedError as refusal:
            run.refusal = refusal.reason
        else:
            self._waiting[ticket] = request, run

    def started(self, worker: Worker) -> list[tuple[DecodeRequest, Run]]:
        if not self.admission.queue:
            return []
        capacity = self._capacity(worker)
        for ticket, refusal in self.admission.late(capacity, worker.now):
            self._waiting.pop(ticket)[1].refusal = refusal.reason
        started = []
        while (ticket_ := self.admission.next(capacity)) is not None:
            capacity.unplaced_tokens += ticket_.work
            started.append(self._waiting.pop(ticket_))
            self._computing[ticket_.ids[0]] = ticket_.work
        return started

    def computed(self, request: DecodeRequest) -> None:
        self.admission.computed(request.id)
        self._computed = max(0, self._computed - self._computing.pop(request.id, 0))

    def ended(self, request: DecodeRequest) -> None:
        self.admission.ended(request.id, request.sequence.num_generated)

    def _capacity(self, worker: Worker) -> Capacity:
        """The fleet as `gateway.admission.capacity` sees it."""
        if worker.now - self._told_at >= HEARTBEAT_S:
            self._told_at = worker.now
            self._tokens_per_s = worker.budget.local_tokens_per_s
            told = sum(max(0, one.sequence.num_unscheduled - 1) for one in worker.scheduler)
            self._computed = max(0, sum(self._computing.values()) - told)
        queued = max(0, sum(self._computing.values()) - self._computed)
        prefiller = Prefiller(tokens_per_s=self._tokens_per_s, queued_tokens=queued, decodes=True)
        return Capacity(workers=(prefiller,), places=Places(total=MAX_SEQUENCES))
