"""The attempts of requests: placed, queued, moved, abandoned, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from common.errors import OverloadedError, QuarantinedError, ServingError, UnavailableError
from common.messages import Cancel, Grammar, Job, Received, WorkerState
from common.tracing import in_trace
from common.words import WorkerStatus
from gateway.admission.rooms import WaitingRooms
from gateway.lifecycle.outbox import Means
from gateway.lifecycle.running import Death, Event, Keeping, Seen
from gateway.request.active import ActiveRequest, job_of, within_deadline
from gateway.request.attempt import AttemptLine
from gateway.request.ends import End, Sign, pause_s
from gateway.request.placement import Charged, Placement
from gateway.request.spec import GenerationSpec
from gateway.request.state import Phase, RequestState
from gateway.request.timeline import Timeline

log = logging.getLogger("baton.requests")

REPLACE_PERIOD_S = 0.1  # pause before an unplaceable request is retried

# Moves without a failure: their metric labels and log texts.
_TOLD = {
    End.PREEMPTED: ("preemptions", "request.preempted", logging.INFO),
    End.REASONING_ENDED: ("reasoning_ended", "request.reasoning_ended", logging.INFO),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The reason for abandoning an attempt."""

    end: End
    detail: str = ""  # replaces the end's own text
    blame: str = ""  # worker that later attempts avoid
    death: Death | None = None  # the worker of the attempt died
    until: asyncio.Future[None] | None = None  # the next attempt waits for it

    @property
    def reason(self) -> str:
        return self.detail or self.end.text

    @property
    def sign(self) -> Sign:
        """Report a sign of death; a certain one is judged by `Suspects` alone."""
        return Sign.NOTHING if self.death is not None and self.death.is_certain else self.end.sign


class Attempts:
    """Starts, moves and ends the attempts of requests in flight."""

    def __init__(
        self,
        seen: Seen,
        means: Means,
        keeping: Keeping,
        rooms: WaitingRooms,
        *,
        gateway_id: str,
        weights: Callable[[str], str],
    ) -> None:
        """`weights`: see `Catalogue.fingerprint`."""
        self._seen, self._means, self._keeping = seen, means, keeping
        self._gateway_id = gateway_id
        self._rooms = rooms
        self._weights = weights

    # -- begin ---------------------------------------------------------------------------------------------------------

    async def begin(self, spec: GenerationSpec, timeline: Timeline, waited_s: float) -> ActiveRequest:
        """Place and queue an admitted request's first attempt. Raises ServingError."""
        received = timeline.submitted_at
        state = RequestState(spec=spec, deadline_at=received + spec.deadline_s)
        request = ActiveRequest(
            state,
            received,
            self._cancel,
            waited_s=waited_s,
            timeline=timeline,
            on_call=self._called,
            on_end_reasoning=self._end_reasoning,
        )
        self._seen.running.add(request)
        self._keeping.records.started(request)
        try:
            async with within_deadline(state, self._keeping.clock()):
                await self._attempt(request)
        except BaseException as error:
            if isinstance(error, UnavailableError) and (state.attempt > 1 or state.phase is not Phase.QUEUED):
                return request  # only the reply was lost: a worker has the job
            state.phase = Phase.ENDED
            self._keeping.records.not_started(request, error)
            if self._seen.running.remove(request):
                self._abandon(request, "failed")  # the job may be queued although no reply came
            raise
        return request

    async def _attempt(self, request: ActiveRequest, because: str = "") -> None:
        """Place and queue another attempt. Raises ServingError."""
        state, now = request.state, self._keeping.clock()
        if not state.begin_attempt(now):
            return
        request.place.lost()
        attempt = state.attempt
        self._choose_weights(state)
        placement = await self._means.placer.place(state, self._seen.running.states)
        self._note_placement(request, placement)
        if state.is_over or state.attempt != attempt:  # it ended before there were charges to release
            self._release(state, "prefill", "decode")
            return
        job = job_of(
            state,
            gateway=self._gateway_id,
            root=self._means.placer.root(state.spec),
            placement=placement,
            traceparent=self._keeping.records.context_for(state.spec.origin.traceparent),
            now=now,
        )
        state.placed(placement.prefill, placement.decode)
        line = AttemptLine(
            number=attempt,
            began_at=now,
            because=because,
            prefill=placement.prefill,
            decode=placement.decode,
            reason=placement.reason,
            costs=placement.costs,
            prompt_tokens=len(state.token_ids),
            promised_tokens=state.cached_tokens,
            traceparent=job.traceparent,
        )
        request.timeline.began(line)
        line.published_at = self._keeping.clock()
        if request.queued_at is None:
            request.queued_at = line.published_at
            request.timings["admission"] = (request.queued_at - request.started_at - request.waited_s) * 1000
        request.job, request.stream_seq = job, 0
        request.stream_seq = await self._means.bus.publish_job(placement.prefill, job)

    def _choose_weights(self, state: RequestState) -> None:
        """Take the model's newest weights, unless the client has tokens of older ones."""
        weights = self._weights(state.spec.model)
        if weights and weights != state.spec.model_fingerprint and state.next_position == 0:
            state.spec = replace(state.spec, model_fingerprint=weights)

    def _note_placement(self, request: ActiveRequest, placement: Placement) -> None:
        state = request.state
        self._keeping.counters[Event(state.spec.model, f"placed:{placement.reason}")] += 1
        request.work = max(1, len(state.token_ids) - state.cached_tokens)
        self._rooms.placed(state.spec, request.work)
        log.debug(
            "request.placed",
            extra={
                "request_id": state.spec.request_id,
                "prefill": placement.prefill,
                "decode": placement.decode,
                "reason": placement.reason,
            },
        )

    # -- move ----------------------------------------------------------------------------------------------------------

    def move_soon(self, request: ActiveRequest, why: Why) -> None:
        self._keeping.background.spawn(self.move(request, why))

    async def move(self, request: ActiveRequest, why: Why) -> None:
        """Abandon the current attempt and start another one after the tokens that the client has."""
        with in_trace(request.state.spec.origin.traceparent):  # a worker's message may be the cause
            await self._move(request, why)

    async def _move(self, request: ActiveRequest, why: Why) -> None:
        state = request.state
        if state.is_over:
            return
        if request.retrying:
            request.lost_attempt = state.attempt  # it failed before its publication was acknowledged
            return
        request.retrying, queued = True, False
        request.timeline.gave_up(why.reason, self._keeping.clock())
        self._note_move(request, why)
        try:
            self._abandon(request, "retry")
            if why.death is not None and self._seen.suspects.convict(state, why.death):
                self._give_up(request, QuarantinedError(f"{state.deaths} workers died of it"))
                return
            error = state.gave_up(why.sign)
            if error is not None:
                self._give_up(request, type(error)(f"{error.message}; last: {why.reason}"))
                return
            state.exclude(why.blame, self._means.placer.decoders(state.spec))
            if why.until is not None:
                await self._wait_for_place(request, why.until)
            await asyncio.sleep(pause_s(why.end, state.fruitless))
            queued = await self._place_again(request, why.reason)
        finally:
            request.retrying = False
            if queued:  # the worker's roles may have changed meanwhile
                self.take_back(request, self._seen.peers.states.get(state.assigned))

    def preempt(self, request: ActiveRequest, until: asyncio.Future[None]) -> None:
        """Preempt a request; it continues when `until` is done."""
        request.place.preemptions += 1
        request.place.lost()
        self.move_soon(request, Why(end=End.PREEMPTED, until=until))

    def _called(self, request: ActiveRequest) -> None:
        """Tell the workers of the newest attempt that the answer ended by a tool call."""
        state = request.state
        if state.spec.sharing.keep.call_ttl_s:
            received = Received(
                request_id=state.spec.request_id, attempt=state.attempt, traceparent=request.context, is_call=True
            )
            for worker in state.workers():
                self._keeping.background.see_to(self._means.orders.received(worker, received))

    def _end_reasoning(self, request: ActiveRequest, grammar: Grammar) -> bool:
        """Move a request to an attempt whose thinking ends now. False: it is over, or thinks no more."""
        state = request.state
        if state.is_over or state.has_generated(grammar.after or []):
            return False
        if not state.is_closing(grammar.after):
            closed = msgspec.structs.replace(grammar, budget=state.next_position)
            state.spec = replace(state.spec, grammar=closed)
            self.move_soon(request, Why(end=End.REASONING_ENDED))
        return True

    async def _wait_for_place(self, request: ActiveRequest, until: asyncio.Future[None]) -> None:
        began_at = self._keeping.clock()
        with contextlib.suppress(ServingError):  # a stopping gateway ends the request
            await until
        request.place.returns_at = self._keeping.clock()
        waited_ms = 1000 * (request.place.returns_at - began_at)
        request.timings["preempted"] = request.timings.get("preempted", 0.0) + waited_ms

    def _note_move(self, request: ActiveRequest, why: Why) -> None:
        event, name, level = _TOLD.get(why.end, ("retries", "request.retry", logging.WARNING))
        self._keeping.counters[Event(request.state.spec.model, event)] += 1
        log.log(
            level,
            name,
            extra={"request_id": request.state.spec.request_id, "reason": why.reason, "blame": why.blame},
        )

    async def _place_again(self, request: ActiveRequest, reason: str) -> bool:
        """Retry until an attempt is queued, or the request is over or late; return True if one is queued."""
        state, because = request.state, reason
        while self._keeping.clock() < state.deadline_at and not state.is_over:
            try:
                await self._attempt(request, because)
                if request.lost_attempt != state.attempt:
                    return not state.is_over
                request.timeline.gave_up("worker lost", self._keeping.clock())
                self._abandon(request, "retry")
            except (UnavailableError, OverloadedError) as error:
                request.timeline.gave_up(f"not queued: {error.message}", self._keeping.clock())
                self._abandon(request, "not queued")  # its number is spent: the job may be queued nevertheless
                because = f"{reason}, then {error.message}"
                await asyncio.sleep(REPLACE_PERIOD_S)
        return False

    def take_back(self, request: ActiveRequest, worker: WorkerState | None) -> None:
        """Move the request if it is queued at a worker that no longer takes such work."""
        if worker is None or request.retrying:
            return
        if request.state.is_misplaced(worker.worker, worker.roles if worker.status == WorkerStatus.READY else []):
            self.move_soon(request, Why(end=End.ROLE_LOST, detail=f"{worker.worker} takes no such work any more"))

    async def queue_again(self) -> None:
        """Queue unclaimed jobs again after the bus was lost: a restarted server forgets them.

        A server that kept them stores none of them twice.
        """
        for request in self._seen.running:
            job = request.job
            if job is None or request.retrying or request.state.phase not in (Phase.QUEUED, Phase.CLAIMED):
                continue
            stream_seq = await self._publish_again(request, job)
            if stream_seq and job is request.job:
                request.stream_seq = stream_seq

    async def _publish_again(self, request: ActiveRequest, job: Job) -> int:
        """The job's sequence in the queue; 0: it could not be queued, and the request moves."""
        try:
            return await self._means.bus.publish_job(request.state.assigned, job)
        except ServingError as error:
            with in_trace(job.traceparent):
                log.warning("request.not_queued_again", extra={"request_id": job.request_id, "error": error.message})
            if job is request.job:
                self.move_soon(request, Why(end=End.BUS_LOST))
            return 0

    # -- end -----------------------------------------------------------------------------------------------------------

    def end(self, request: ActiveRequest, error: ServingError | None, *, cancel: str = "") -> None:
        """End a request: finished, with `error`, or cancelled."""
        state = request.state
        if not self._seen.running.remove(request):
            return
        if cancel or error is not None:
            self._abandon(request, cancel or "failed")
        else:
            self._release(state, "decode")
        self._keeping.records.ended(request, error, cancelled=cancel)
        state.phase = Phase.ENDED
        self._rooms.ended(state.spec, len(state.generated))
        self._seen.suspects.heard(state)
        request.finish(error)

    def _cancel(self, request: ActiveRequest, reason: str) -> None:
        self.end(request, None, cancel=reason)

    def _give_up(self, request: ActiveRequest, error: ServingError) -> None:
        """End the request for good; a harmful one's job goes to the dead letters."""
        is_harmful = isinstance(error, QuarantinedError)
        self._keeping.counters[Event(request.state.spec.model, "quarantined" if is_harmful else "given_up")] += 1
        if is_harmful and request.job is not None:
            assigned = request.state.assigned or "none"
            self._keeping.background.spawn(self._means.bus.bury_job(assigned, request.job, reason=error.message))
        self.end(request, type(error)(f"the request was given up: {error.message}"))

    def _abandon(self, request: ActiveRequest, reason: str) -> None:
        """Cancel the current attempt on all workers, in the background, and release its charges."""
        state = request.state
        cancel = Cancel(
            request_id=state.spec.request_id, attempt=state.attempt, traceparent=request.context, reason=reason
        )
        for worker in state.workers():
            self._keeping.background.spawn(self._means.orders.cancel(worker, cancel))
        if request.job is not None and request.stream_seq and (state.claimed_by is None or reason == "retry"):
            self._keeping.background.spawn(self._means.bus.delete_job(request.stream_seq, request.job))
        self._release(state, "prefill", "decode")

    def release_prefill(self, request: ActiveRequest) -> None:
        """Release the prefill worker's charge: the prompt is computed."""
        self._release(request.state, "prefill")

    def _release(self, state: RequestState, *stages: str) -> None:
        """Release the current attempt's charges. Its workers are unknown if Redis's reply was lost."""
        workers = tuple(name for name in dict.fromkeys([state.assigned, *state.candidates, *state.workers()]) if name)
        self._means.placer.releases.add(Charged(state.spec.request_id, state.attempt, stages, workers))
