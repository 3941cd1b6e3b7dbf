"""Timers: deadlines, silence, a lost bus, and a suspended process."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from common.errors import DeadlineExceededError
from common.tracing import in_trace
from common.words import Role
from gateway.admission.rooms import WaitingRooms
from gateway.lifecycle.attempts import Attempts, Why
from gateway.lifecycle.outbox import Means
from gateway.lifecycle.probes import Probes
from gateway.lifecycle.running import Keeping, Seen
from gateway.lifecycle.silence import Action, Silence, diagnose
from gateway.request.active import ActiveRequest

log = logging.getLogger("baton.requests")

WATCH_PERIOD_S = 0.1
STALL_S = 0.5  # a later check means that this process was suspended
RECONNECT_GRACE_S = 3.0  # workers, too, need time to reconnect


class Watchdog:
    """Checks every request ten times a second."""

    def __init__(
        self, seen: Seen, means: Means, keeping: Keeping, attempts: Attempts, probes: Probes, rooms: WaitingRooms
    ) -> None:
        self._seen, self._means, self._keeping = seen, means, keeping
        self._attempts = attempts
        self._probes = probes
        self._rooms = rooms
        self._connections = means.bus.reconnects
        self._looked_at = keeping.clock()
        self._settled_at = 0.0  # before this, nobody's silence counts

    async def run(self) -> None:
        """Run until cancelled."""
        self._connections, self._looked_at = self._means.bus.reconnects, self._keeping.clock()
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            self.look(self._keeping.clock())

    def look(self, now: float) -> None:
        before, self._looked_at = self._looked_at, now
        self._seen.pulse.was_late(max(0.0, now - before - WATCH_PERIOD_S))
        if now - before > STALL_S:  # first handle the messages that came meanwhile
            for request in self._seen.running:
                request.state.pardon(now - before)
            self._seen.pulse.pardon(now)
            return
        self._check_bus(now)
        self._probes.ask_silent(self._seen.running.needed_workers(), now)
        self._rooms.look_again()
        prefillers = Counter(state.model_fingerprint for state in self._means.placer.workers(Role.PREFILL))
        for request in self._seen.running:
            try:
                weights = request.state.spec.model_fingerprint
                num_prefillers = prefillers[weights] if weights else prefillers.total()
                self._look_at(request, now, has_other_prefiller=num_prefillers > 1)
            except Exception:
                with in_trace(request.context):
                    log.exception("request.watch_failed", extra={"request_id": request.state.spec.request_id})

    def _check_bus(self, now: float) -> None:
        if not self._means.bus.connected:
            self._settled_at = now + RECONNECT_GRACE_S
        elif self._means.bus.reconnects != self._connections:
            self._connections, self._settled_at = self._means.bus.reconnects, now + RECONNECT_GRACE_S
            self._keeping.background.spawn(self._attempts.queue_again())
        if now < self._settled_at:
            self._seen.pulse.pardon(now)

    def _look_at(self, request: ActiveRequest, now: float, *, has_other_prefiller: bool) -> None:
        state = request.state
        if now >= state.deadline_at:
            self._attempts.end(request, DeadlineExceededError("the request's deadline passed"), cancel="deadline")
            return
        if now >= request.first_token_by and state.next_position == 0:
            error = DeadlineExceededError("the first token did not come in time")
            self._attempts.end(request, error, cancel="deadline")
            return
        if request.retrying or request.probing or not self._means.bus.connected or self._seen.peers.hears_nobody:
            return
        action, end = diagnose(_silence_of(request, now, has_other_prefiller=has_other_prefiller))
        match action:
            case Action.WAIT:
                pass
            case Action.ASK_DECODER:
                self._probes.ask_for(request, state.decoder)
            case Action.ASK_CLAIMER:
                self._probes.ask_for(request, state.claimed_by)
            case Action.LOOK_FOR_JOB:
                self._probes.look_for_job(request)
            case Action.MOVE | Action.MOVE_ELSEWHERE if end is not None:
                blame = state.assigned if action is Action.MOVE_ELSEWHERE else ""
                self._attempts.move_soon(request, Why(end=end, blame=blame))


def _silence_of(request: ActiveRequest, now: float, *, has_other_prefiller: bool) -> Silence:
    state = request.state
    return Silence(
        phase=state.phase,
        progress_s=now - state.progress_at,
        known_s=now - request.known_at,
        gap_s=0.0 if state.gap_since is None else now - state.gap_since,
        fruitless=min(state.fruitless, 20),
        has_queued_job=bool(request.stream_seq),
        has_other_prefiller=has_other_prefiller,
    )
