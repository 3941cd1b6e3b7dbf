"""The decode role of a worker: the continuous batch, its token frames, and the gateway's questions about streams.

KV comes in through `decode.intake` and `decode.reservations`; `decode.scheduler` decides who runs when.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as ListOf

from common.errors import InvalidRequestError, ServingError, StepFailedError, UnavailableError
from common.messages import (
    Ack,
    Cancel,
    Dial,
    DialReply,
    Failed,
    Handoff,
    Job,
    Received,
    Resend,
    Reserve,
    ReserveAgain,
    Tokens,
    ToWorker,
    WorkerReply,
    WorkerState,
    WriterDone,
)
from common.tracing import in_trace
from common.words import Role
from decode.drafts.speculation import NO_SPECULATION, Speculation
from decode.intake import Intake
from decode.micro_batches import MicroBatches
from decode.pacing import GoalPacing
from decode.request import DecodeRequest, drafts_of, record_decode
from decode.scheduler import DecodeScheduler
from engine.engine import Chunk, Sampled
from worker.context import RoleContext
from worker.roles import CancelReason, Computed, RoleLoad
from worker.serving.allocation import publish_computed, sequence_of, withdraw
from worker.serving.checks import check_job
from worker.serving.chunks import finish
from worker.serving.jobs import Cancelled, ClaimedJob

log = logging.getLogger("baton.decode")

MOST_WAITING = 32  # local jobs that wait for a pass: handoffs find the other places
KEEP_ENDED_S = 30.0  # longest time that a finished stream waits for `Received`
LATE_AFTER_S = 1.0  # drops late requests here in case the gateway's cancellation was lost


class DecodeRole:
    """Owns the sequences that decode here, from the accepted handoff (or local job) to the last token."""

    name = Role.DECODE

    def __init__(self, context: RoleContext, *, speculation: Speculation = NO_SPECULATION) -> None:
        self._context = context
        self._speculation = speculation
        self.scheduler = DecodeScheduler(
            pool=context.cache.pool,
            max_sequences=context.model.max_sequences,
            max_model_len=context.model.max_model_len,
            pacing=GoalPacing(context.passes.budget),
            expected=lambda: self._reservations.num_open,
            trials=context.passes.trials,
            turns=context.cache.turns,
            speculation=speculation,
        )
        self.scheduler.elsewhere, self.scheduler.batches = context.cache.elsewhere, MicroBatches.of(context.passes)
        self._requests: dict[str, DecodeRequest] = {}  # includes ended ones until received
        self._local: dict[DecodeRequest, ClaimedJob] = {}  # local jobs without a first token yet
        self._building: set[DecodeRequest] = set()  # waiting for their grammar, with a batch slot
        self._cancelled = Cancelled()
        self._intake = Intake(
            context,
            placed=lambda: len(self._placed),
            running=lambda: len(self.scheduler.running),
            cancelled=self._cancelled,
            activate=self.activate,
        )
        self._reservations = self._intake.reservations
        self._housekeeping = context.background.spawn(self._keep_house())

    # -- jobs that are prefilled here ------------------------------------------------------------------------------

    def takes(self, job: Job) -> bool:
        return not job.decode_workers

    def room(self) -> int:
        if self.scheduler.lacks_blocks:
            return 0
        free = self._context.model.max_sequences - len(self._placed) - self._reservations.num_open
        return min(free, MOST_WAITING - len(self.scheduler.waiting))

    @property
    def _placed(self) -> list[DecodeRequest]:
        """Every request that has a batch slot, or is about to need one."""
        return [*self.scheduler, *self._building]

    async def prepare(self) -> None:
        """No-op: writers connect to us."""

    async def start(self, claimed: ClaimedJob) -> None:
        job = claimed.job
        try:
            check_job(job, vocab_size=self._context.model.vocab_size, max_model_len=self._context.model.max_model_len)
        except InvalidRequestError as error:
            await self._context.jobs.fail(claimed, code=error.code, message=error.message, retryable=False)
            return
        if not self._supersede(job):
            await self._context.jobs.drop(claimed)
            return
        sequence = sequence_of(job)
        self._context.cache.offered(sequence, job)
        request = DecodeRequest.claimed(claimed, sequence)
        self._local[request] = claimed
        self._requests[job.request_id] = request
        self._context.passes.trials.watch(sequence, job.gateway, job.context)
        if sequence.grammar is None:
            self._enqueue(request)
        else:
            self._building.add(request)
            self._context.background.spawn(self._enqueue_when_built(request))

    async def _enqueue_when_built(self, request: DecodeRequest) -> None:
        await self._context.model.built(request.sequence)
        if request in self._building:  # otherwise it was cancelled
            self._building.remove(request)
            self._enqueue(request)

    def _enqueue(self, request: DecodeRequest) -> None:
        self.scheduler.enqueue(request)
        self._context.passes.wake()

    def activate(self, request: DecodeRequest) -> None:
        """Add a sequence to the batch, from a verified handoff or a local prompt; it joins the next pass."""
        if not self._supersede(request.job):
            self.scheduler.remove(request)
            return
        self._requests[request.id] = request
        self._context.passes.trials.watch(request.sequence, request.job.gateway, request.job.context)
        self.scheduler.join(request)
        self._context.passes.wake()

    def adopt(self, prompt: Computed) -> bool:
        """Continue a prompt of this worker's prefill role if the batch has a slot: it needs no further block.

        Sequences that wait for blocks keep no place from it: they may wait for its own.
        """
        if len(self.scheduler.running) + self._reservations.num_open >= self._context.model.max_sequences:
            return False
        request = DecodeRequest(
            job=prompt.job,
            sequence=prompt.sequence,
            deadline_at=prompt.deadline_at,
            first_position=prompt.sequence.num_generated - 1,
            logprobs=prompt.logprobs,
            cached_tokens=prompt.cached_tokens,
        )
        self.activate(request)
        return True

    def _supersede(self, job: Job) -> bool:
        """Cancel an older attempt of the same request; return False if `job` itself is already over."""
        if self._cancelled.covers(job):
            return False
        older = self._requests.get(job.request_id)
        if older is not None and older.attempt >= job.attempt:
            return False
        if older is not None:
            self._stop(older, "superseded")
        return True

    # -- the pipeline ----------------------------------------------------------------------------------------------

    def plan(self, token_budget: int) -> list[Chunk]:
        for request in [request for request in self._placed if request.expired]:
            if time.monotonic() > request.deadline_at + LATE_AFTER_S:
                self._stop(request, "deadline")
        return self.scheduler.plan(token_budget)

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        for chunk, sampled in results:
            request = self.scheduler.landed(chunk)
            if request.is_over:
                continue  # planned before its stop token, cancellation or failure was known
            further = () if sampled is None else sampled.further
            finish(self._context.cache.pool, chunk, len(further))
            if chunk.drafted:
                self._context.totals.verified(drafted=len(chunk.drafted), accepted=len(further))
                self._speculation.verified(chunk.sequence, drafted=len(chunk.drafted), accepted=len(further))
                request.drafted += len(chunk.drafted)
                request.accepted += len(further)
            if sampled is not None and sampled.prompt_logprobs is not None:
                chunk.sequence.scored(chunk, sampled.prompt_logprobs)
            if chunk.sample:
                self._take(request, [sampled, *further])
        self._context.jobs.room_changed()

    def _take(self, request: DecodeRequest, results: ListOf[Sampled | None]) -> None:
        """Send a pass's tokens, and end or fail the request with the last of them."""
        position = request.sequence.num_generated
        count = request.take(results, max_model_len=self._context.model.max_model_len)
        self._context.totals.generated_tokens += count
        if count:
            self._send(request, position)
            request.sequence.propose(drafts_of(results[count - 1]))
        if request.finish:
            publish_computed(self._context.cache.pool, request.sequence)  # a draft's tokens are known now
            request.ended_at = time.monotonic()
            self.scheduler.remove(request)
            self._speculation.ended(request.sequence)
            record_decode(self._context.tracer, request, worker=self._context.identity.worker)
        elif count < len(results) and (unusable := results[count]) is not None:
            self._fail(request, unusable.problem, error=InvalidRequestError)
        elif count < len(results):
            withdraw(self._context.cache.pool, request.sequence)
            self._fail(request, "no finite logits")

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        if chunks:
            self._context.totals.step_failed(error)
        for chunk in chunks:
            request = self.scheduler.landed(chunk)
            if not request.is_over:
                self._fail(request, f"step failed: {type(error).__name__}")
        self._context.jobs.room_changed()

    def _send(self, request: DecodeRequest, position: int) -> None:
        tokens = request.tokens_from(position)
        if tokens is None:
            return
        claimed = self._local.pop(request, None)
        if claimed is not None:
            tokens = self._first_local_token(request, claimed, tokens)
        self._context.outbox.add(request.job.gateway, tokens)

    def _first_local_token(self, request: DecodeRequest, claimed: ClaimedJob, tokens: Tokens) -> Tokens:
        """Settle a locally prefilled job with its first token and its cached tokens."""
        self._context.totals.admitted(request.sequence, prompt_tokens=len(request.sequence.token_ids) - 1)
        self._context.background.spawn(
            self._context.jobs.settle(
                claimed,
                decode_worker=self._context.identity.worker,
                decode_incarnation=self._context.identity.incarnation,
            )
        )
        return request.prefilled_here(tokens, since=claimed.claimed_at)

    # -- the end of a request --------------------------------------------------------------------------------------

    def _stop(self, request: DecodeRequest, reason: str) -> None:
        """Remove a request; its blocks go back now, or after the passes that use them."""
        request.stopped = reason
        self._building.discard(request)
        if self._requests.get(request.id) is request:
            del self._requests[request.id]
        claimed = self._local.pop(request, None)
        if claimed is not None:
            self._context.background.spawn(self._context.jobs.drop(claimed))
        if request.ended_at is None:
            self.scheduler.remove(request)
            record_decode(self._context.tracer, request, worker=self._context.identity.worker)
        self._context.jobs.room_changed()
        self._context.passes.wake()

    def _fail(self, request: DecodeRequest, message: str, *, error: type[ServingError] = StepFailedError) -> None:
        claimed = self._local.pop(request, None)
        self._stop(request, message)
        if claimed is not None:
            failing = self._context.jobs.fail(claimed, code=error.code, message=message, retryable=error.retryable)
            self._context.background.spawn(failing)
            return
        failed = Failed(
            **self._context.identity.head(request.job),
            code=error.code,
            message=message,
            retryable=error.retryable,
        )
        self._context.background.spawn(self._publish_failed(request.job.gateway, failed))

    async def _publish_failed(self, gateway: str, failed: Failed) -> None:
        try:
            await self._context.messenger.tell_gateway(gateway, failed)
        except UnavailableError:
            with in_trace(failed.traceparent):
                log.warning("decode.failure_not_told", extra={"request_id": failed.request_id})

    async def _keep_house(self) -> None:
        """Drop finished streams without a gateway and service the leases, until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            self._context.cache.turns.look_after(now)
            for request in list(self._requests.values()):
                if request.ended_at is not None and now - request.ended_at > KEEP_ENDED_S:
                    del self._requests[request.id]
            try:
                await self._intake.look_after(now)
            except Exception:
                log.exception("decode.housekeeping_failed")

    # -- control ---------------------------------------------------------------------------------------------------

    async def handle(self, message: ToWorker) -> WorkerReply | None:
        match message:
            case Dial():
                return DialReply(region=self._context.transfers.region)
            case Reserve() | ReserveAgain():
                return await self._intake.reserve(message)
            case Handoff():
                return await self._intake.hand_over(message)
            case WriterDone():
                return self._reservations.writer_done(message)
            case Cancel():
                return Ack(known=await self._cancel(message))
            case Resend():
                return Ack(known=self._resend(message))
            case Received():
                return Ack(known=self._received(message))
            case _:
                return None

    async def _cancel(self, message: Cancel) -> bool:
        if message.worker:
            return await self._intake.give_up(message)
        if self._is_anothers(message):
            return False
        self._cancelled.add(message)
        known = await self._reservations.cancel(message.request_id, message.attempt)
        request = self._requests.get(message.request_id)
        if request is None or request.attempt > message.attempt:
            return known
        self._stop(request, "cancelled")
        return True

    def _resend(self, message: Resend) -> bool:
        """Resend a known request's tokens, if any; moving an unknown one is the gateway's decision."""
        request = self._requests.get(message.request_id)
        if request is None or request.attempt != message.attempt or message.worker:  # not a lease of ours to abort
            return False
        tokens = request.tokens_from(message.position)
        if tokens is not None and tokens.position >= message.position:
            self._context.outbox.add(request.job.gateway, tokens)
        return True

    def _received(self, message: Received) -> bool:
        request = self._requests.get(message.request_id)
        if request is None or request.attempt != message.attempt or request.ended_at is None:
            return False
        if self._is_anothers(message):
            return False
        del self._requests[message.request_id]
        return True

    def _is_anothers(self, message: Cancel | Received) -> bool:
        """True if the request belongs to a gateway other than the speaker."""
        request = self._requests.get(message.request_id)
        jobs = [request.job] if request is not None else []
        jobs += [one.job for one in self._reservations if one.job.request_id == message.request_id]
        return bool(message.gateway) and any(job.gateway != message.gateway for job in jobs)

    async def cancel_all(self, reason: CancelReason, *, gateway: str | None = None) -> None:
        for request in list(self._requests.values()):
            if gateway is None or request.job.gateway == gateway:
                self._stop(request, reason.value)
        await self._reservations.cancel_all(gateway=gateway)

    def worker_joined(self, state: WorkerState) -> None:
        """No-op: writers connect to us."""

    def worker_lost(self, worker: str, incarnation: int) -> None:
        self._reservations.worker_lost(worker, incarnation)

    def load(self) -> RoleLoad:
        return RoleLoad(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._building) + self._reservations.num_open,
            queued_tokens=sum(max(0, request.sequence.num_unscheduled - 1) for request in self._placed),
            held_blocks=self._reservations.held_blocks,
            preemptions=self.scheduler.preemptions,
            bad_digests=self._intake.bad_digests,
        )

    def idle(self) -> bool:
        return not self._placed and self._reservations.num_open == 0

    async def close(self) -> None:
        self._housekeeping.cancel()
