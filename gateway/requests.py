"""The owner of every request of this gateway: admission, placement, claims, tokens, retries, deadlines, cancellation.

What a request's state is and may become is `gateway.owner.RequestState`; this file listens, asks and tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from common import subjects
from common.bus import Bus
from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    PlaceAgainError,
    QuarantinedError,
    ServingError,
    UnavailableError,
    error_from_code,
)
from common.messages import (
    Ack,
    Cancel,
    Claim,
    ClaimReply,
    Failed,
    Frame,
    GatewayReply,
    Imported,
    Resend,
    Settle,
    SettleReply,
    ToGateway,
    Tokens,
    WorkerState,
    frame_decoder,
    gateway_state_decoder,
    to_gateway_decoder,
)
from common.peers import Peers
from common.store import Store
from common.tracing import NoTracer, Tracer
from gateway.active import ActiveRequest, job_of
from gateway.admission import RequestLimits
from gateway.attainment import Attainment, ServiceLevels
from gateway.fleet import Fleet
from gateway.generation import GenerationSpec
from gateway.orders import Orders
from gateway.owner import Phase, RequestState, Worker
from gateway.placer import Placer
from gateway.spans import RequestSpans
from gateway.suspects import Suspects
from gateway.timeline import AttemptLine, Timelines
from gateway.waiting import WaitingRoom

log = logging.getLogger("baton.requests")

WATCH_S = 0.1
BEAT_S = 1.0
GAP_RESEND_S = 0.2
GAP_LOST_S = 5.0  # what is missing for so long, nobody has
SILENT_S = 0.75  # a decoding stream without a token for so long is asked for
WAITING_S = 2.0  # and so is a request that a worker claimed and that has no decode worker yet
STALLED_S = 0.5  # the watch is late by so much
PROBES = 2  # unanswered ones before the attempt is given up
UNCLAIMED_S = 10.0
HANDOVER_S = 15.0  # first token seen, and nobody decodes


class Requests:
    """Implements `gateway.generation.Generations` over the bus."""

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
        self._room = WaitingRoom(self._limits, lambda: self._fleet.capacity(self._active.values()))
        self._suspects = Suspects()
        self._active: dict[str, ActiveRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[Any]] = []
        self._draining = False
        self._counters: Counter[str] = Counter()
        self._spans = RequestSpans(tracer or NoTracer(), gateway_id, levels or ServiceLevels())
        self._timelines = Timelines()
        self._attainment = Attainment(levels or ServiceLevels(), started_at=time.monotonic())
        self._timelines.on_end(self._spans.record)

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for workers; from now on requests can be submitted."""
        await self._bus.serve(subjects.gateway(self._gateway_id), to_gateway_decoder, self._handle)
        await self._bus.subscribe(subjects.frames(self._gateway_id), frame_decoder, self._on_frame)
        await self._bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._fleet.saw)
        self._peers.on_lost(self._on_lost)
        self._peers.on_changed(self._on_changed)
        self._loops = [self._spawn(self._beat()), self._spawn(self._watch())]

    async def drain(self, timeout_s: float) -> None:
        """Take no more, refuse those who wait; let what runs end; after `timeout_s` end it with an error."""
        self._draining = True
        self._room.refuse_all(UnavailableError(self.not_ready_reason))
        waits = [active.ended.wait() for active in self._active.values()]
        if waits:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*waits)
        for active in list(self._active.values()):
            await self._end(active, UnavailableError("the gateway is shutting down"), cancel="gateway drained")

    async def close(self) -> None:
        """Stop listening and beating."""
        for loop in self._loops:
            loop.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)

    # -- what HTTP sees ----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self._room.in_flight

    @property
    def waiting(self) -> Mapping[str, tuple[int, int]]:
        return self._room.waiting

    @property
    def counters(self) -> Counter[str]:
        refused = {f"refused:{reason}": count for reason, count in self._room.refused.items()}
        return self._counters + Counter(refused) + Counter({f"work:{k}": v for k, v in self._room.work.items()})

    @property
    def timelines(self) -> Timelines:
        return self._timelines

    @property
    def fleet(self) -> list[WorkerState]:
        return list(self._peers.states.values())

    @property
    def ready_workers(self) -> dict[str, int]:
        return {role: len(self._placer.workers(role)) for role in ("prefill", "decode")}

    @property
    def max_model_len(self) -> int | None:
        lengths = [state.max_model_len for state in self._placer.workers("decode") + self._placer.workers("prefill")]
        return min(lengths, default=None)

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        if self._draining:
            return "the gateway is shutting down"
        if not self._bus.connected:
            return "no connection to NATS"
        if not self._placer.workers("decode"):
            return "no decode worker is ready"
        return ""

    async def submit(self, specs: Sequence[GenerationSpec]) -> list[ActiveRequest]:
        received = time.monotonic()
        for spec in specs:
            self._check(spec)
        waited_s = await self._room.enter(specs)
        begun: list[ActiveRequest] = []
        try:
            for spec in specs:
                begun.append(await self._begin(spec, received, waited_s))
        except BaseException:
            for active in begun:
                await self._end(active, None, cancel="not all choices could start")
            for spec in specs:
                self._room.ended(spec, 0)
            raise
        return begun

    async def _begin(self, spec: GenerationSpec, received: float, waited_s: float) -> ActiveRequest:
        state = RequestState(spec=spec, deadline_at=received + spec.deadline_s)
        active = ActiveRequest(state, received, self._cancel, waited_s=waited_s)
        self._active[spec.request_id] = active
        self._timelines.start(active.timeline)
        try:
            await self._attempt(active)
        except BaseException as error:
            self._timelines.end(active.timeline, error=error)
            if self._active.pop(spec.request_id, None) is not None:
                self._abandon(active, "failed")  # perhaps it was queued, and the answer lost
            raise
        return active

    def _check(self, spec: GenerationSpec) -> None:
        if self.not_ready_reason:
            raise UnavailableError(self.not_ready_reason)
        if spec.deadline_s <= 0:
            raise DeadlineExceededError("the deadline has passed")
        limit = self.max_model_len
        if limit is not None and len(spec.token_ids) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(spec.token_ids)} tokens, the context {limit}", param="prompt"
            )
        if spec.request_id in self._active:
            raise InvalidRequestError(f"request {spec.request_id} is running already", param="request_id")

    # -- attempts ------------------------------------------------------------------------------------------------------

    async def _attempt(self, active: ActiveRequest, because: str = "") -> None:
        """Place and queue another attempt. Raises ServingError when that can't be done."""
        state, now = active.state, time.monotonic()
        if not state.begin_attempt(now):
            raise QuarantinedError(f"given up after {state.num_tried} attempts")
        attempt = state.attempt
        worker, decode_workers, reason = await self._placer.place(
            state, [other.state for other in self._active.values()]
        )
        self._counters[f"placed:{reason}"] += 1
        log.debug(
            "request.placed",
            extra={"request_id": state.spec.request_id, "prefill": worker, "decode": decode_workers, "reason": reason},
        )
        if state.is_over or state.attempt != attempt:
            return  # cancelled meanwhile
        root, traceparent = self._placer.root(state.spec), self._spans.context_for(state.spec.traceparent)
        job = job_of(
            state, gateway=self._gateway_id, root=root, decode_workers=decode_workers, traceparent=traceparent, now=now
        )
        state.placed(worker, decode_workers)
        line = AttemptLine.of(job, worker, reason=reason, because=because, began_at=now)
        active.timeline.began(line)
        active.published_at = line.published_at = time.monotonic()
        active.timings.setdefault("admission", (active.published_at - active.started_at - active.waited_s) * 1000)
        active.job, active.stream_seq = job, 0
        active.stream_seq = await self._bus.publish_job(worker, job)

    async def _retry(
        self, active: ActiveRequest, reason: str, *, blame: str = "", tried: bool = True, dead_with: int = 0
    ) -> None:
        """Give the current attempt up and start another, from what the client has already.

        `tried`: whether the attempt counts, because some worker began it. `dead_with`: requests that the worker had when it
        died, this one included; 0 when it did not die.
        """
        state = active.state
        if state.is_over:
            return
        state.moves += not tried
        if active.retrying:
            active.lost_attempt = state.attempt  # it failed before this gateway knew that it was queued
            return
        active.retrying = True
        active.timeline.gave_up(reason, time.monotonic())
        self._counters["retries"] += 1
        log.warning("request.retry", extra={"request_id": state.spec.request_id, "reason": reason, "blame": blame})
        try:
            self._abandon(active, "retry")
            if dead_with and self._suspects.convict(state, others=dead_with - 1):
                await self._quarantine(active, f"{state.deaths} workers died of it")
                return
            await self._suspects.alone(state)
            state.exclude(blame, [worker.worker for worker in self._placer.workers("decode")])
            while time.monotonic() < state.deadline_at:
                try:
                    await self._attempt(active, reason)
                    if active.lost_attempt != state.attempt:
                        return
                    active.timeline.gave_up("worker lost", time.monotonic())
                    self._abandon(active, "retry")
                except (UnavailableError, OverloadedError) as error:
                    active.timeline.gave_up(f"not queued: {error.message}", time.monotonic())
                    self._abandon(active, "not queued")
                    state.untried += 1  # or it was, and the answer lost: never the same number again
                    await asyncio.sleep(WATCH_S)
                    if state.is_over:
                        return
                except ServingError as error:
                    await self._quarantine(active, f"{error.message}; last: {reason}")
                    return
        finally:
            active.retrying = False
            self._take_back(active, self._peers.states.get(state.assigned))  # it may have changed meanwhile

    async def _quarantine(self, active: ActiveRequest, reason: str) -> None:
        """Give the request up for good, and keep its job for whoever looks into it."""
        self._counters["quarantined"] += 1
        if active.job is not None:
            self._spawn(self._bus.bury_job(active.state.assigned or "none", active.job, reason=reason))
        await self._end(active, QuarantinedError(f"the request was given up: {reason}"))

    def _abandon(self, active: ActiveRequest, reason: str) -> None:
        """Stop the current attempt wherever it is, in the background, and give its charges back."""
        state = active.state
        cancel = Cancel(request_id=state.spec.request_id, attempt=state.attempt, reason=reason)
        for worker in state.workers():
            self._spawn(self._orders.cancel(worker, cancel))
        if active.job is not None and active.stream_seq and state.claimed_by is None:
            self._spawn(self._bus.delete_job(active.stream_seq, active.job))
        self._release(state, "prefill")
        self._release(state, "decode")

    def _release(self, state: RequestState, stage: str) -> None:
        workers = [name for name in dict.fromkeys([state.assigned, *state.candidates, *state.workers()]) if name]
        if workers:  # as they are now: when the task runs, the next attempt may have begun
            self._spawn(self._placer.release(state.spec.request_id, state.attempt, stage=stage, workers=workers))

    async def _cancel(self, active: ActiveRequest, reason: str) -> None:
        await self._end(active, None, cancel=reason)

    async def _end(self, active: ActiveRequest, error: ServingError | None, *, cancel: str = "") -> None:
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

    # -- what workers say ------------------------------------------------------------------------------------------------

    async def _handle(self, message: ToGateway) -> GatewayReply | None:
        active = self._active.get(message.request_id)
        worker = (message.worker, message.incarnation)
        match message:
            case Claim():
                return self._claim(active, message.attempt, worker)
            case Settle():
                if active is None:
                    return SettleReply(ack=True)  # over already; the job must not come again
                decoder = (message.decode_worker, message.decode_incarnation) if message.decode_worker else None
                active.settled(message)
                return SettleReply(ack=active.state.settle(message.attempt, worker, decoder))
            case Imported():
                if active is not None and active.state.imported(message.attempt, worker):
                    active.imported(message)
                return Ack(known=active is not None)
            case Failed():
                self._failed(active, message)
                return Ack(known=active is not None)

    def _claim(self, active: ActiveRequest | None, attempt: int, worker: Worker) -> ClaimReply:
        if active is None:
            return ClaimReply(granted=False, reason="unknown")
        now = time.monotonic()
        refusal = active.state.claim(attempt, worker, now)
        if refusal:
            self._counters["claims_refused"] += 1
            return ClaimReply(granted=False, reason=refusal)
        active.claimed_at = now
        active.timeline.claimed(worker[0], now)
        return ClaimReply(granted=True, remaining_ms=max(0, int((active.state.deadline_at - now) * 1000)))

    def _failed(self, active: ActiveRequest | None, message: Failed) -> None:
        if active is None or message.attempt != active.state.attempt:
            return
        if message.retryable:
            tried = message.code != PlaceAgainError.code
            blame = message.worker if tried else ""
            self._spawn(self._retry(active, message.message, blame=blame, tried=tried))
        else:
            self._spawn(self._end(active, error_from_code(message.code, message.message)))

    def _on_frame(self, frame: Frame) -> None:
        sender = (frame.worker, frame.incarnation)
        for tokens in frame.tokens:
            active = self._active.get(tokens.request_id)
            if active is None:
                if tokens.finish:
                    self._spawn(self._orders.received(frame.worker, tokens.request_id, tokens.attempt))
                continue
            self._take(active, tokens, sender)

    def _take(self, active: ActiveRequest, tokens: Tokens, sender: Worker) -> None:
        state, now = active.state, time.monotonic()
        if tokens.attempt != state.attempt:
            self._counters["stale_tokens"] += 1
            return
        was_first = state.next_position == 0
        events = state.take(tokens, sender, now)
        if events and was_first:
            active.explain_first_token(tokens, now)
            self._room.computed(state.spec)
        if events and active.prefilled != state.attempt:
            active.prefilled = state.attempt
            self._release(state, "prefill")
        self._suspects.heard(state)
        for event in events:
            active.timeline.took(tokens, len(event.token_ids), event.finish, now)
            active.events.put_nowait(event)
        if state.is_over:
            self._spawn(self._orders.received(sender[0], tokens.request_id, tokens.attempt))
            self._spawn(self._end(active, None))

    def _on_changed(self, worker: WorkerState) -> None:
        for active in list(self._active.values()):
            self._take_back(active, worker)

    def _take_back(self, active: ActiveRequest, worker: WorkerState | None) -> None:
        """Place again at once what waits in the queue of a worker that takes no such work any more."""
        if worker is None or active.retrying:
            return
        if active.state.is_misplaced(worker.worker, worker.roles if worker.status == "ready" else []):
            self._spawn(self._retry(active, f"{worker.worker} takes no such work any more", tried=False))

    def _on_lost(self, worker: str, incarnation: int) -> None:
        here = sum(active.state.is_with(worker) for active in self._active.values())
        dead_with = 0 if self._peers.left(worker, incarnation) else here
        for active in list(self._active.values()):
            if active.state.lost((worker, incarnation)):
                began = active.state.phase is not Phase.QUEUED
                retry = self._retry(active, "worker lost", blame=worker, dead_with=dead_with if began else 0)
                self._spawn(retry)

    # -- time ------------------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(UnavailableError):
                await self._bus.publish(
                    subjects.gateway_heartbeat(self._gateway_id),
                    self._room.tell(
                        self._attainment.state(
                            self._gateway_id, self._incarnation, self._active.values(), time.monotonic()
                        ),
                        self._active.values(),
                    ),
                )
            await asyncio.sleep(BEAT_S)

    async def _watch(self) -> None:
        connections, now = self._bus.reconnects, time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            before, now = now, time.monotonic()
            if now - before > STALLED_S:  # this process stood still: first hear what came meanwhile
                for active in self._active.values():
                    active.state.pardon(now - before)
                continue
            if self._bus.connected and self._bus.reconnects != connections:
                connections = self._bus.reconnects
                self._spawn(self._queue_again())
            self._room.look_again()
            for active in list(self._active.values()):
                try:
                    await self._look_at(active, now)
                except Exception:
                    log.exception("request.watch_failed")

    async def _queue_again(self) -> None:
        """The server may have been restarted, and jobs are in its memory: those that it still has it doesn't store twice."""
        for active in list(self._active.values()):
            state, job = active.state, active.job
            if job is None or active.retrying or state.phase not in (Phase.QUEUED, Phase.CLAIMED):
                continue
            try:
                stream_seq = await self._bus.publish_job(state.assigned, job)
            except ServingError as error:
                log.warning("request.not_queued_again", extra={"request_id": job.request_id, "error": error.message})
                if job is active.job:
                    self._spawn(self._retry(active, "the bus was lost"))
                continue
            if job is active.job:
                active.stream_seq = stream_seq

    async def _look_at(self, active: ActiveRequest, now: float) -> None:
        state = active.state
        if now >= state.deadline_at:
            await self._end(active, DeadlineExceededError("the request's deadline passed"), cancel="deadline")
            return
        if now >= active.first_token_by and state.next_position == 0:
            await self._end(active, DeadlineExceededError("the first token did not come in time"), cancel="deadline")
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

    def _probe(self, active: ActiveRequest, worker: Worker | None) -> None:
        if worker is not None:
            active.probing = True
            self._spawn(self._ask_again(active, worker[0], active.state.attempt))

    async def _ask_again(self, active: ActiveRequest, worker: str, attempt: int) -> None:
        """Ask the worker for everything from the next position on. One that doesn't know the request lost it."""
        state, phase = active.state, active.state.phase
        decodes = state.decoder is not None and state.decoder[0] == worker
        resend = Resend(request_id=state.spec.request_id, attempt=attempt, position=state.next_position)
        self._counters["resends"] += 1
        known: bool | None = None
        try:
            known = await self._orders.resend(worker, resend)
            state.unanswered = 0 if known else PROBES
            active.known_at = time.monotonic()
        except UnavailableError:  # in other phases `Peers` tells who is lost: a long prompt has time for that
            state.unanswered += self._bus.connected and decodes
        finally:
            active.probing = False
        if state.attempt != attempt or state.phase is not phase:
            state.unanswered = 0
        elif state.unanswered >= PROBES:
            reason = "the worker lost the request" if known is False else "the worker doesn't answer"
            here = sum(other.state.is_with(worker) for other in self._active.values())
            await self._retry(active, reason, blame=worker, dead_with=here if known is None else 0)
        elif state.unanswered == 0 and decodes:
            state.progress_at = time.monotonic()

    # -- small things ------------------------------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("request.task_failed", exc_info=task.exception())
