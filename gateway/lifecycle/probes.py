"""Questions to workers (are you there, do you have this request, is its job still queued?), and what a worker's loss means."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

from common.errors import NobodyListensError, UnavailableError
from common.messages import Ack, Resend
from common.peers import Incarnation
from gateway.admission.capacity import Fleet
from gateway.lifecycle.attempts import Attempts, Why
from gateway.lifecycle.outbox import Means
from gateway.lifecycle.pulse import Verdict
from gateway.lifecycle.running import Death, Event, Keeping, Seen
from gateway.request.active import ActiveRequest
from gateway.request.ends import End
from gateway.request.state import Phase

log = logging.getLogger("baton.requests")

MAX_PROBES = 2  # unanswered questions before an attempt is abandoned
TRIAL_PROBES = 8  # while the worker tries this suspect alone


class Losses:
    """Moves the requests of lost workers, and describes a worker's death."""

    def __init__(self, seen: Seen, keeping: Keeping, attempts: Attempts, fleet: Fleet) -> None:
        self._seen, self._keeping = seen, keeping
        self._attempts = attempts
        self._fleet = fleet

    def lost(self, worker: Incarnation, reason: str, *, died: bool) -> None:
        """Start another attempt of everything that the worker had, all at the same time."""
        others = self._seen.running.num_with(worker.worker) - 1
        self._seen.pulse.forget(worker.worker)
        self._fleet.forget(worker.worker)
        was_stopped = self._seen.peers.left(*worker)  # no fault, and the attempt does not count
        for request in self._seen.running:
            if request.state.lost(worker):
                began = request.state.phase is not Phase.QUEUED
                end = End.STOPPED if was_stopped else End.WORKER_LOST if began else End.NOT_BEGUN
                death = Death(worker, others, is_certain=died) if end is End.WORKER_LOST else None
                self._attempts.move_soon(request, Why(end=end, detail=reason, blame=worker.worker, death=death))

    def death_of(self, worker: str, *, is_certain: bool) -> Death:
        """The death of a worker that doesn't answer for a request."""
        is_certain = is_certain and self._seen.pulse.is_fresh(worker, self._keeping.clock())
        state = self._seen.peers.states.get(worker)
        number = state.incarnation if state is not None else self._seen.suspects.last_named(worker)
        return Death(Incarnation(worker, number), self._seen.running.num_with(worker), is_certain=is_certain)


class Probes:
    """Asks in the background, and moves requests according to the replies."""

    def __init__(self, seen: Seen, means: Means, keeping: Keeping, attempts: Attempts, losses: Losses) -> None:
        self._seen, self._means, self._keeping = seen, means, keeping
        self._attempts = attempts
        self._losses = losses

    # -- is a worker there? --------------------------------------------------------------------------------------------

    def ask_silent(self, needed: Mapping[str, bool], now: float) -> None:
        """Ping the workers that were silent for a moment. `needed`: see `Running.needed_workers`."""
        for worker, has_streams in needed.items():
            if self._seen.pulse.ask(worker, now, decodes=has_streams):
                self._keeping.background.spawn(self._ask_worker(worker))

    async def _ask_worker(self, worker: str) -> None:
        """Ping a worker; if it is gone, or silent while others are heard, move its requests now, before its lease ends."""
        self._keeping.counters[Event("", "workers_asked")] += 1
        try:
            await self._means.orders.ask(worker, timeout_s=self._seen.pulse.answer_s)
        except NobodyListensError:
            verdict = self._seen.pulse.nobody_listens(worker, self._keeping.clock())
        except UnavailableError:
            verdict = self._seen.pulse.no_answer(worker)
        else:
            self._seen.pulse.answered(worker, self._keeping.clock())
            return
        state = self._seen.peers.states.get(worker)
        if verdict is not Verdict.WAIT and state is not None and self._means.bus.connected:
            log.warning("worker.no_pulse", extra={"worker": worker, "verdict": verdict.value})
            self._keeping.counters[Event("", "workers_lost")] += 1
            self._seen.peers.drop(worker)
            died = verdict is Verdict.GONE
            self._losses.lost(Incarnation(worker, state.incarnation), verdict.value, died=died)

    # -- does it have the request? -------------------------------------------------------------------------------------

    def ask_for(self, request: ActiveRequest, worker: Incarnation | None) -> None:
        """Ask the worker, if it is known yet, for all tokens from the next position on."""
        if worker is not None:
            request.probing = True
            self._keeping.background.spawn(self._ask_for(request, worker.worker))

    async def _ask_for(self, request: ActiveRequest, worker: str) -> None:
        state, attempt, phase = request.state, request.state.attempt, request.state.phase
        decodes = state.decoder is not None and state.decoder.worker == worker
        answer: Ack | None = None
        self._keeping.counters[Event(state.spec.model, "resends")] += 1
        resend = Resend(
            request_id=state.spec.request_id,
            attempt=attempt,
            traceparent=request.context,
            position=state.next_position,
        )
        try:
            answer = await self._means.orders.resend(worker, resend)
            state.unanswered = 0
            request.known_at = self._keeping.clock()
        except NobodyListensError:  # the worker's pulse covers all its requests
            state.unanswered = 0
        except UnavailableError:  # before decoding, only the worker's pulse counts
            state.unanswered += self._means.bus.connected and decodes
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
            if decodes or answer.waits:  # a waiting request has not failed: its deadline limits it
                state.progress_at = self._keeping.clock()

    def _patience_with(self, worker: str, request: ActiveRequest) -> int:
        return TRIAL_PROBES if self._seen.suspects.is_tried_by(worker, request.state) else MAX_PROBES

    # -- is the job still queued? --------------------------------------------------------------------------------------

    def look_for_job(self, request: ActiveRequest) -> None:
        """Move the request if its job left the queue unclaimed."""
        request.known_at = self._keeping.clock()
        self._keeping.background.spawn(self._look_for_job(request, request.state.attempt))

    async def _look_for_job(self, request: ActiveRequest, attempt: int) -> None:
        with contextlib.suppress(UnavailableError):  # the next check comes in a few seconds
            if not await self._means.bus.has_job(request.stream_seq) and request.state.waits(attempt):
                await self._attempts.move(request, Why(end=End.QUEUE_LOST))
