"""Questions to workers: are you there, do you have this request, is its job still queued?"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from common.bus import Bus
from common.errors import NobodyListensError, UnavailableError
from common.messages import Ack, Resend
from common.peers import Incarnation, Peers
from gateway.lifecycle.attempts import Attempts, Why
from gateway.lifecycle.background import Background
from gateway.lifecycle.losses import Losses
from gateway.lifecycle.outbox import Orders
from gateway.lifecycle.pulse import Pulse, Verdict
from gateway.lifecycle.records import Event
from gateway.lifecycle.suspects import Suspects
from gateway.request.active import ActiveRequest
from gateway.request.ends import End

log = logging.getLogger("baton.requests")

MAX_PROBES = 2  # unanswered questions before an attempt is given up
TRIAL_PROBES = 8  # more patience while the worker tries this suspect alone


class Probes:
    """Asks in the background, and moves requests by the answers."""

    def __init__(
        self,
        *,
        bus: Bus,
        peers: Peers,
        orders: Orders,
        attempts: Attempts,
        losses: Losses,
        suspects: Suspects,
        pulse: Pulse,
        background: Background,
        counters: Counter[Event],
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._peers = peers
        self._orders = orders
        self._attempts = attempts
        self._losses = losses
        self._suspects = suspects
        self._pulse = pulse
        self._background = background
        self._counters = counters
        self._clock = clock

    # -- is a worker there? --------------------------------------------------------------------------------------------

    def ask_silent(self, needed: Mapping[str, bool], now: float) -> None:
        """Ask the workers that were not heard for a moment. `needed`: see `Running.needed_workers`."""
        for worker, has_streams in needed.items():
            if self._pulse.ask(worker, now, decodes=has_streams):
                self._background.spawn(self._ask_worker(worker))

    async def _ask_worker(self, worker: str) -> None:
        """A worker that is gone, or silent while others are heard, loses its requests now, before its lease ends."""
        self._counters[Event("", "workers_asked")] += 1
        try:
            await self._orders.ask(worker, timeout_s=self._pulse.answer_s)
        except NobodyListensError:
            verdict = self._pulse.nobody_listens(worker, self._clock())
        except UnavailableError:
            verdict = self._pulse.no_answer(worker)
        else:
            self._pulse.answered(worker, self._clock())
            return
        state = self._peers.states.get(worker)
        if verdict is not Verdict.WAIT and state is not None and self._bus.connected:
            log.warning("worker.no_pulse", extra={"worker": worker, "verdict": verdict.value})
            self._counters[Event("", "workers_lost")] += 1
            self._peers.drop(worker)
            died = verdict is Verdict.GONE
            self._losses.lost(Incarnation(worker, state.incarnation), verdict.value, died=died)

    # -- does it have the request? -------------------------------------------------------------------------------------

    def ask_for(self, request: ActiveRequest, worker: Incarnation | None) -> None:
        """Ask the worker, if it is known yet, for everything from the next position on."""
        if worker is not None:
            request.probing = True
            self._background.spawn(self._ask_for(request, worker.worker))

    async def _ask_for(self, request: ActiveRequest, worker: str) -> None:
        state, attempt, phase = request.state, request.state.attempt, request.state.phase
        decodes = state.decoder is not None and state.decoder.worker == worker
        answer: Ack | None = None
        self._counters[Event(state.spec.model, "resends")] += 1
        resend = Resend(
            request_id=state.spec.request_id,
            attempt=attempt,
            traceparent=request.context,
            position=state.next_position,
        )
        try:
            answer = await self._orders.resend(worker, resend)
            state.unanswered = 0
            request.known_at = self._clock()
        except NobodyListensError:  # the worker's pulse will tell for all its requests
            state.unanswered = 0
        except UnavailableError:  # before decoding, only the worker's pulse counts
            state.unanswered += self._bus.connected and decodes
        finally:
            request.probing = False
        if state.attempt != attempt or state.phase is not phase:
            state.unanswered = 0
        elif answer is not None and not answer.known:
            await self._attempts.move(request, Why(end=End.REQUEST_LOST, blame=worker))
        elif state.unanswered >= self._patience_with(worker, request):
            death = self._losses.death_of(worker, is_certain=False) if answer is None else None
            why = Why(end=End.UNANSWERED, blame=worker, death=death)
            await self._attempts.move(request, why)
        elif answer is not None:
            request.place.waits = answer.waits and not decodes
            if decodes or answer.waits:  # who waits has not failed: the deadline bounds it
                state.progress_at = self._clock()

    def _patience_with(self, worker: str, request: ActiveRequest) -> int:
        return TRIAL_PROBES if self._suspects.is_tried_by(worker, request.state) else MAX_PROBES

    # -- is the job still queued? --------------------------------------------------------------------------------------

    def look_for_job(self, request: ActiveRequest) -> None:
        """Move the request if its job left the queue unclaimed."""
        request.known_at = self._clock()
        self._background.spawn(self._look_for_job(request, request.state.attempt))

    async def _look_for_job(self, request: ActiveRequest, attempt: int) -> None:
        with contextlib.suppress(UnavailableError):  # the next look comes in a few seconds
            if not await self._bus.has_job(request.stream_seq) and request.state.waits(attempt):
                await self._attempts.move(request, Why(end=End.QUEUE_LOST))
