"""One attempt of a request after another: placed, queued, given up, ended. What `Requests` and its other parts stand on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from common.bus import Bus
from common.errors import (
    OverloadedError,
    QuarantinedError,
    ServingError,
    UnavailableError,
)
from common.messages import (
    Cancel,
    WorkerState,
)
from common.peers import Peers
from common.store import Store
from common.tracing import NoTracer, Tracer, in_trace
from gateway.active import ActiveRequest, job_of, within_deadline
from gateway.admission import RequestLimits
from gateway.attainment import Attainment, ServiceLevels
from gateway.fleet import Fleet
from gateway.generation import GenerationSpec
from gateway.orders import Orders
from gateway.owner import Phase, RequestState, Worker
from gateway.placer import Placer
from gateway.pulse import Pulse
from gateway.spans import RequestSpans
from gateway.suspects import Death, Suspects
from gateway.timeline import AttemptLine, Timeline, Timelines
from gateway.waiting import WaitingRoom

log = logging.getLogger("baton.requests")

AGAIN_S = 0.1  # until a request that nobody can take is tried again


class Attempts:
    """The requests in flight, and what is done about one of them."""

    def __init__(
        self,
        *,
        bus: Bus,
        store: Store,
        peers: Peers,
        gateway_id: str,
        incarnation: int,
        limits: RequestLimits | None = None,
        levels: ServiceLevels | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._bus = bus
        self._peers = peers
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._limits = limits or RequestLimits()
        self._placer = Placer(store=store, peers=peers, cut_over_tokens=self._limits.cut_over_tokens)
        self._orders = Orders(bus, peers)
        self._fleet = Fleet(self._placer, gateway_id=gateway_id, local=self._limits.cut_over_tokens < 0)
        self._room = WaitingRoom(
            self._limits,
            lambda: self._fleet.capacity(self._active.values()),
            work=self._placer.uncached_tokens,
        )
        self._suspects = Suspects()
        self._pulse = Pulse()
        self._active: dict[str, ActiveRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[Any]] = []
        self._draining = False
        self._counters: Counter[str] = Counter()
        self._spans = RequestSpans(tracer or NoTracer(), gateway_id, levels or ServiceLevels())
        self._timelines = Timelines()
        self._attainment = Attainment(levels or ServiceLevels(), started_at=time.monotonic())
        self._timelines.on_end(self._spans.record)

    async def _begin(self, spec: GenerationSpec, timeline: Timeline, waited_s: float) -> ActiveRequest:
        received = timeline.submitted_at
        state = RequestState(spec=spec, deadline_at=received + spec.deadline_s)
        active = ActiveRequest(state, received, self._cancel, waited_s=waited_s, timeline=timeline)
        self._active[spec.request_id] = active
        self._timelines.start(active.timeline)
        try:
            async with within_deadline(state):
                await self._attempt(active)
        except BaseException as error:
            if isinstance(error, UnavailableError) and (state.attempt > 1 or state.phase is not Phase.QUEUED):
                return active  # only the answer was lost: a worker has it
            state.phase = Phase.ENDED
            self._timelines.end(active.timeline, error=error)
            if self._active.pop(spec.request_id, None) is not None:
                self._abandon(active, "failed")  # perhaps it was queued, and the answer lost
            raise
        return active

    async def _attempt(self, active: ActiveRequest, because: str = "") -> None:
        """Place and queue another attempt. Raises ServingError when that can't be done."""
        state, now = active.state, time.monotonic()
        if not state.begin_attempt(now):
            raise QuarantinedError(f"given up after {state.num_tried} attempts")
        attempt = state.attempt
        placement = await self._placer.place(state, [other.state for other in self._active.values()])
        worker, decode_workers, reason = placement.prefill, placement.decode, placement.reason
        self._counters[f"placed:{reason}"] += 1
        active.work = max(1, len(state.token_ids) - state.cached_tokens)
        self._room.placed(state.spec, active.work)
        log.debug(
            "request.placed",
            extra={"request_id": state.spec.request_id, "prefill": worker, "decode": decode_workers, "reason": reason},
        )
        if state.is_over or state.attempt != attempt:  # ended meanwhile, and given back before it was charged
            self._release(state, "prefill", "decode")
            return
        root, traceparent = self._placer.root(state.spec), self._spans.context_for(state.spec.traceparent)
        job = job_of(
            state, gateway=self._gateway_id, root=root, decode_workers=decode_workers, traceparent=traceparent, now=now
        )
        state.placed(worker, decode_workers)
        line = AttemptLine.of(job, placement, because=because, began_at=now, promised_tokens=state.cached_tokens)
        active.timeline.began(line)
        line.published_at = time.monotonic()
        if active.queued_at is None:
            active.queued_at = line.published_at
            active.timings["admission"] = (active.queued_at - active.started_at - active.waited_s) * 1000
        active.job, active.stream_seq = job, 0
        active.stream_seq = await self._bus.publish_job(worker, job)

    async def _retry(
        self, active: ActiveRequest, reason: str, *, blame: str = "", tried: bool = True, death: Death | None = None
    ) -> None:
        """Give the current attempt up and start another, from what the client has already.

        `tried`: whether the attempt counts, because some worker began it. `death`: of the worker that had it.
        """
        with in_trace(active.state.spec.traceparent):  # whoever found out that it has to move
            await self._move(active, reason, blame=blame, tried=tried, death=death)

    async def _move(self, active: ActiveRequest, reason: str, *, blame: str, tried: bool, death: Death | None) -> None:
        state = active.state
        if state.is_over:
            return
        state.moves += not tried
        if active.retrying:
            active.lost_attempt = state.attempt  # it failed before this gateway knew that it was queued
            return
        active.retrying, queued = True, False
        active.timeline.gave_up(reason, time.monotonic())
        self._counters["retries"] += 1
        log.warning("request.retry", extra={"request_id": state.spec.request_id, "reason": reason, "blame": blame})
        try:
            self._abandon(active, "retry")
            if death is not None and self._suspects.convict(state, death):
                await self._quarantine(active, f"{state.deaths} workers died of it")
                return
            state.exclude(blame, [worker.worker for worker in self._placer.workers("decode")])
            while time.monotonic() < state.deadline_at and not state.is_over:
                try:
                    await self._attempt(active, reason)
                    if active.lost_attempt != state.attempt:
                        queued = True
                        return
                    active.timeline.gave_up("worker lost", time.monotonic())
                    self._abandon(active, "retry")
                except (UnavailableError, OverloadedError) as error:
                    active.timeline.gave_up(f"not queued: {error.message}", time.monotonic())
                    self._abandon(active, "not queued")
                    state.untried += 1  # or it was, and the answer lost: never the same number again
                    await asyncio.sleep(AGAIN_S)
                except ServingError as error:
                    await self._quarantine(active, f"{error.message}; last: {reason}")
                    return
        finally:
            active.retrying = False
            if queued:  # the worker may have changed meanwhile
                self._take_back(active, self._peers.states.get(state.assigned))

    def _move_from(self, worker: Worker, reason: str, *, died: bool) -> None:
        """Start another attempt of everything that the worker had or was to have, all at the same time."""
        here = sum(active.state.is_with(worker[0]) for active in self._active.values())
        self._pulse.forget(worker[0])
        self._fleet.forget(worker[0])
        left = self._peers.left(*worker)  # told to stop: a long answer may see many of them go
        for active in list(self._active.values()):
            if active.state.lost(worker):
                began = active.state.phase is not Phase.QUEUED
                death = Death(worker, here - 1, is_certain=died) if began and not left else None
                self._spawn(self._retry(active, reason, blame=worker[0], tried=began and not left, death=death))

    def _death_of(self, worker: str, *, is_certain: bool) -> Death:
        """Of a worker that doesn't answer for a request."""
        state = self._peers.states.get(worker)
        here = sum(active.state.is_with(worker) for active in self._active.values())
        incarnation = state.incarnation if state is not None else self._suspects.last_named(worker)
        return Death((worker, incarnation), here, is_certain=is_certain)

    async def _quarantine(self, active: ActiveRequest, reason: str) -> None:
        """Give the request up for good, and keep its job for whoever looks into it."""
        self._counters["quarantined"] += 1
        if active.job is not None:
            self._spawn(self._bus.bury_job(active.state.assigned or "none", active.job, reason=reason))
        self._end(active, QuarantinedError(f"the request was given up: {reason}"))

    def _abandon(self, active: ActiveRequest, reason: str) -> None:
        """Stop the current attempt wherever it is, in the background, and give its charges back."""
        state = active.state
        request_id, traceparent = state.spec.request_id, active.context
        cancel = Cancel(request_id=request_id, attempt=state.attempt, traceparent=traceparent, reason=reason)
        for worker in state.workers():
            self._spawn(self._orders.cancel(worker, cancel))
        if active.job is not None and active.stream_seq and (state.claimed_by is None or reason == "retry"):
            self._spawn(self._bus.delete_job(active.stream_seq, active.job))
        self._release(state, "prefill", "decode")

    def _release(self, state: RequestState, *stages: str) -> None:
        workers = [name for name in dict.fromkeys([state.assigned, *state.candidates, *state.workers()]) if name]
        for stage in stages:  # of the attempt as it is now; also without workers: perhaps the answer was lost
            self._spawn(self._placer.release(state.spec.request_id, state.attempt, stage=stage, workers=workers))

    async def _cancel(self, active: ActiveRequest, reason: str) -> None:
        self._end(active, None, cancel=reason)

    def _end(self, active: ActiveRequest, error: ServingError | None, *, cancel: str = "") -> None:
        """The request is over: with its last token, with `error`, or because the client left."""
        state = active.state
        if self._active.pop(state.spec.request_id, None) is None:
            return
        if cancel or error is not None:
            self._abandon(active, cancel or "failed")
        else:
            self._release(state, "decode")
        self._timelines.end(active.timeline, error=error, cancelled=cancel)
        self._attainment.ended(active, error, time.monotonic())
        state.phase = Phase.ENDED
        self._room.ended(state.spec, len(state.generated))
        self._suspects.heard(state)
        active.finish(error)

    def _take_back(self, active: ActiveRequest, worker: WorkerState | None) -> None:
        """Place again at once what waits in the queue of a worker that takes no such work any more."""
        if worker is None or active.retrying:
            return
        if active.state.is_misplaced(worker.worker, worker.roles if worker.status == "ready" else []):
            self._spawn(self._retry(active, f"{worker.worker} takes no such work any more", tried=False))

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("request.task_failed", exc_info=task.exception())
