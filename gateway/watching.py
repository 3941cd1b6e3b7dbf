"""What time brings: heartbeats, deadlines, and asking after what fell silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import msgspec

from common import subjects
from common.errors import (
    DeadlineExceededError,
    NobodyListensError,
    ServingError,
    UnavailableError,
)
from common.messages import (
    Resend,
)
from common.tracing import in_trace
from gateway.active import ActiveRequest
from gateway.attempts import Attempts
from gateway.owner import Phase, Worker
from gateway.pulse import Verdict

log = logging.getLogger("baton.requests")

WATCH_S = 0.1
BEAT_S = 1.0
GAP_RESEND_S = 0.2
GAP_LOST_S = 5.0  # what is missing for so long, nobody has
SILENT_S = 0.75  # a decoding stream without a token for so long is asked for
WAITING_S = 2.0  # and so is a request that a worker claimed and that has no decode worker yet
STALLED_S = 0.5  # the watch is late by so much
SETTLED_S = 3.0  # after this gateway's bus was lost, workers connect again as well: that nobody listens says nothing
PATIENT_PROBES = (
    8  # of one that the worker said it would try: what became of that worker tells who killed the one before
)
PROBES = 2  # unanswered ones before the attempt is given up
UNCLAIMED_S = 10.0
LOOK_FOR_JOB_S = 5.0  # unclaimed: is it still in the queue?
HANDOVER_S = 15.0  # first token seen, and nobody decodes


class Watching(Attempts):
    """Looks at every request ten times a second."""

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(UnavailableError):
                now = time.monotonic()
                state = self._attainment.state(self._gateway_id, self._incarnation, self._active.values(), now)
                state = msgspec.structs.replace(
                    self._room.tell(state, self._active.values()), kept_traces=self._spans.kept(now)
                )
                await self._bus.publish(subjects.gateway_heartbeat(self._gateway_id), state)
            await asyncio.sleep(BEAT_S)

    async def _watch(self) -> None:
        connections, now, settled_at = self._bus.reconnects, time.monotonic(), 0.0
        while True:
            await asyncio.sleep(WATCH_S)
            before, now = now, time.monotonic()
            self._pulse.was_late(max(0.0, now - before - WATCH_S))
            if now - before > STALLED_S:  # this process stood still: first hear what came meanwhile
                for active in self._active.values():
                    active.state.pardon(now - before)
                self._pulse.pardon(now)
                continue
            if not self._bus.connected:
                settled_at = now + SETTLED_S
            elif self._bus.reconnects != connections:
                connections, settled_at = self._bus.reconnects, now + SETTLED_S
                self._spawn(self._queue_again())
            if now < settled_at:
                self._pulse.pardon(now)
            self._feel(now)
            self._room.look_again()
            for active in list(self._active.values()):
                try:
                    await self._look_at(active, now)
                except Exception:
                    with in_trace(active.context):
                        log.exception("request.watch_failed", extra={"request_id": active.state.spec.request_id})

    async def _queue_again(self) -> None:
        """The server may have been restarted, and jobs are in its memory: those that it still has it doesn't store twice."""
        for active in list(self._active.values()):
            state, job = active.state, active.job
            if job is None or active.retrying or state.phase not in (Phase.QUEUED, Phase.CLAIMED):
                continue
            try:
                stream_seq = await self._bus.publish_job(state.assigned, job)
            except ServingError as error:
                with in_trace(job.traceparent):
                    log.warning(
                        "request.not_queued_again", extra={"request_id": job.request_id, "error": error.message}
                    )
                if job is active.job:
                    self._spawn(self._retry(active, "the bus was lost"))
                continue
            if job is active.job:
                active.stream_seq = stream_seq

    async def _look_at(self, active: ActiveRequest, now: float) -> None:
        state = active.state
        if now >= state.deadline_at:
            self._end(active, DeadlineExceededError("the request's deadline passed"), cancel="deadline")
            return
        if now >= active.first_token_by and state.next_position == 0:
            self._end(active, DeadlineExceededError("the first token did not come in time"), cancel="deadline")
            return
        if active.retrying or active.probing or not self._bus.connected or self._peers.hears_nobody:
            return
        silent_s = now - state.progress_at
        gap_s = now - state.gap_since if state.gap_since is not None else 0.0
        if gap_s > GAP_LOST_S:
            self._spawn(self._retry(active, "tokens are missing"))
        elif gap_s > GAP_RESEND_S or (state.phase is Phase.DECODING and silent_s > SILENT_S):
            self._probe(active, state.decoder)
        elif state.phase is Phase.PREFILLED and silent_s > HANDOVER_S:
            self._spawn(self._retry(active, "nobody took the sequence over"))
        elif state.phase in (Phase.CLAIMED, Phase.PREFILLED) and min(silent_s, now - active.known_at) > WAITING_S:
            self._probe(active, state.claimed_by)
        elif state.phase is Phase.QUEUED and silent_s > UNCLAIMED_S and len(self._placer.workers("prefill")) > 1:
            self._spawn(self._retry(active, "not claimed", blame=state.assigned))
        elif (
            state.phase is Phase.QUEUED and active.stream_seq and min(silent_s, now - active.known_at) > LOOK_FOR_JOB_S
        ):
            active.known_at = now
            self._spawn(self._look_for_job(active, state.attempt))

    def _feel(self, now: float) -> None:
        """Ask the workers that have requests and were not heard for a moment."""
        decodes: dict[str, bool] = {}
        for active in self._active.values():
            if not active.retrying:
                for worker in active.state.needs:
                    decodes[worker] = decodes.get(worker, False) or active.state.phase is Phase.DECODING
        for worker, has_streams in decodes.items():
            if self._pulse.ask(worker, now, decodes=has_streams):
                self._spawn(self._ask_worker(worker))

    async def _ask_worker(self, worker: str) -> None:
        """One that is gone, or silent while others are heard, has lost its requests: no lease is waited for."""
        self._counters["workers_asked"] += 1
        try:
            await self._orders.ask(worker, timeout_s=self._pulse.answer_s)
        except NobodyListensError:
            verdict = self._pulse.nobody_listens(worker, time.monotonic())
        except UnavailableError:
            verdict = self._pulse.no_answer(worker)
        else:
            self._pulse.answered(worker, time.monotonic())
            return
        state = self._peers.states.get(worker)
        if verdict is not Verdict.WAIT and state is not None and self._bus.connected:
            log.warning("worker.no_pulse", extra={"worker": worker, "verdict": verdict.value})
            self._counters["workers_lost"] += 1
            self._peers.drop(worker)
            self._move_from((worker, state.incarnation), verdict.value, died=verdict is Verdict.GONE)

    async def _look_for_job(self, active: ActiveRequest, attempt: int) -> None:
        """One that is in the queue no more was given up, because nobody answered its claims."""
        with contextlib.suppress(UnavailableError):  # looked for again later
            if not await self._bus.has_job(active.stream_seq) and active.state.waits(attempt):
                await self._retry(active, "the queue gave the job up")

    def _probe(self, active: ActiveRequest, worker: Worker | None) -> None:
        if worker is not None:
            active.probing = True
            self._spawn(self._ask_again(active, worker[0], active.state.attempt))

    async def _ask_again(self, active: ActiveRequest, worker: str, attempt: int) -> None:
        """Ask the worker for everything from the next position on. One that doesn't know the request lost it."""
        state, phase = active.state, active.state.phase
        decodes = state.decoder is not None and state.decoder[0] == worker
        resend = Resend(
            request_id=state.spec.request_id,
            attempt=attempt,
            traceparent=active.context,
            position=state.next_position,
        )
        self._counters["resends"] += 1
        known: bool | None = None
        try:
            known = await self._orders.resend(worker, resend)
            state.unanswered = 0
            active.known_at = time.monotonic()
        except NobodyListensError:  # it is gone: its pulse says so in a moment, for all that it had
            state.unanswered = 0
        except UnavailableError:  # in other phases the worker's pulse tells who is lost
            state.unanswered += self._bus.connected and decodes
        finally:
            active.probing = False
        patience = PATIENT_PROBES if self._suspects.is_tried_by(worker, state) else PROBES
        if state.attempt != attempt or state.phase is not phase:
            state.unanswered = 0
        elif known is False or state.unanswered >= patience:
            reason = "the worker lost the request" if known is False else "the worker doesn't answer"
            death = self._death_of(worker, is_certain=False) if known is None else None
            await self._retry(active, reason, blame=worker, death=death)
        elif known and decodes:
            state.progress_at = time.monotonic()
