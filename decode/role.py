"""The decode role of a worker: the continuous batch, its token frames, and everything the gateway may ask of a stream.

How KV comes in is `decode.intake`; who runs when is `decode.scheduler`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as ListOf

import msgspec

from common import subjects
from common.errors import InvalidRequestError, UnavailableError
from common.messages import (
    Ack,
    Cancel,
    Failed,
    Handoff,
    Job,
    Received,
    Resend,
    Reserve,
    Tokens,
    ToWorker,
    WorkerReply,
    WorkerState,
    WriterDone,
)
from common.tracing import in_trace
from decode.intake import Intake
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from decode.spans import record_decode
from engine.engine import Chunk, Sampled
from worker.checks import check_job
from worker.host import WorkerHost
from worker.jobs import ClaimedJob
from worker.prefix import publish_computed, sequence_of
from worker.roles import RoleLoad
from worker.tombstones import Tombstones

log = logging.getLogger("baton.decode")

KEEP_ENDED_S = 30.0  # a finished stream is kept for `Resend` until the gateway has it, this long at most
LATE_S = 1.0  # past its deadline a request is dropped here too, should the gateway's cancel be lost


class DecodeRole:
    """Owns the sequences that are decoded here, from the accepted hand-over (or local job) to the last token."""

    name = "decode"

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._scheduler = DecodeScheduler(
            pool=host.pool,
            max_sequences=host.settings.max_sequences,
            max_model_len=host.max_model_len,
            prompt_budget=host.device.prompt_budget,
            expects=lambda: self._intake.num_leases > 0,
            trials=host.device.trials,
        )
        self._requests: dict[str, DecodeRequest] = {}  # also ended ones, until received
        self._local: dict[DecodeRequest, ClaimedJob] = {}  # local jobs whose first token is not out
        self._cancelled = Tombstones()
        self._intake = Intake(
            host, running=lambda: len(self._scheduler), cancelled=self._cancelled, activate=self._activate
        )
        self._housekeeping = host.spawn(self._keep_house())

    # -- jobs that are prefilled here ------------------------------------------------------------------------------

    def takes(self, job: Job) -> bool:
        return not job.decode_workers

    def room(self) -> int:
        if self._scheduler.waiting:
            return 0
        return self._host.settings.max_sequences - len(self._scheduler) - self._intake.num_leases

    async def prepare(self) -> None:
        """Writers have connected to us when we joined."""

    async def start(self, claimed: ClaimedJob) -> None:
        job = claimed.job
        try:
            check_job(job, vocab_size=self._host.engine.vocab_size, max_model_len=self._host.max_model_len)
        except InvalidRequestError as error:
            await self._host.jobs.fail(claimed, code=error.code, message=error.message, retryable=False)
            return
        if not self._supersede(job):
            await self._host.jobs.drop(claimed)
            return
        sequence = sequence_of(job)
        request = DecodeRequest(
            job=job, sequence=sequence, deadline_at=claimed.deadline_at, first_position=sequence.num_generated
        )
        self._local[request] = claimed
        self._requests[job.request_id] = request
        self._host.device.trials.watch(sequence, job.gateway, job.context)
        self._scheduler.enqueue(request)
        self._host.device.wake()

    def _activate(self, request: DecodeRequest) -> None:
        """A verified hand-over: the sequence joins the batch with its next pass."""
        if not self._supersede(request.job):
            self._scheduler.remove(request)
            return
        self._requests[request.id] = request
        self._host.device.trials.watch(request.sequence, request.job.gateway, request.job.context)
        self._scheduler.join(request)
        self._host.device.wake()

    def _supersede(self, job: Job) -> bool:
        """Make way for a newer attempt of the same request; False if `job` itself is over already."""
        if self._cancelled.covers(job.request_id, job.attempt):
            return False
        older = self._requests.get(job.request_id)
        if older is not None and older.attempt >= job.attempt:
            return False
        if older is not None:
            self._stop(older, "superseded")
        return True

    # -- the device loop -------------------------------------------------------------------------------------------

    def plan(self, token_budget: int) -> list[Chunk]:
        for request in [request for request in self._scheduler if request.expired]:
            if time.monotonic() > request.deadline_at + LATE_S:
                self._stop(request, "deadline")
        return self._scheduler.plan(token_budget)

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        for chunk, sampled in results:
            request = self._scheduler.landed(chunk)
            if request.is_over:
                continue  # planned before its stop token, its cancellation or its failure was known
            chunk.sequence.finish(chunk)
            publish_computed(self._host.pool, chunk.sequence)
            if chunk.sample and sampled is None:
                self._host.pool.withdraw(chunk.sequence.block_table)  # else everybody with this prefix would fail
                self._fail(request, "no finite logits")
            elif chunk.sample and sampled is not None:
                self._append(request, sampled)
        self._host.jobs.room_changed()

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        if chunks:
            self._host.totals.step_failed(error)
        for chunk in chunks:
            request = self._scheduler.landed(chunk)
            if not request.is_over:
                self._fail(request, f"step failed: {type(error).__name__}")
        self._host.jobs.room_changed()

    def _append(self, request: DecodeRequest, sampled: Sampled) -> None:
        sequence = request.sequence
        position = sequence.num_generated
        sequence.append(sampled.token_id)
        self._host.totals.generated_tokens += 1
        if sampled.logprobs is not None:
            request.logprobs.append(sampled.logprobs)
        request.first_token_at = request.first_token_at or time.monotonic()
        request.finish = sequence.finish_reason()
        if not request.finish and len(sequence.token_ids) >= self._host.max_model_len:
            request.finish = "length"
        self._send(request, position)
        if request.finish:
            request.ended_at = time.monotonic()
            self._scheduler.remove(request)
            record_decode(self._host.tracer, request, worker=self._host.worker_id)

    def _send(self, request: DecodeRequest, position: int) -> None:
        tokens = request.tokens_from(position)
        if tokens is None:
            return
        claimed = self._local.pop(request, None)
        if claimed is not None:
            tokens = self._first_local_token(request, claimed, tokens)
        self._host.outbox.add(request.job.gateway, tokens)

    def _first_local_token(self, request: DecodeRequest, claimed: ClaimedJob, tokens: Tokens) -> Tokens:
        """The first token of a locally prefilled job: settle the job and say what the prefix cache spared."""
        self._host.totals.admitted(
            prompt_tokens=len(request.sequence.token_ids) - 1, cached_tokens=request.sequence.num_cached
        )
        self._host.spawn(
            self._host.jobs.settle(
                claimed, decode_worker=self._host.worker_id, decode_incarnation=self._host.incarnation
            )
        )
        return msgspec.structs.replace(
            tokens,
            cached_tokens=min(request.sequence.num_cached, request.job.num_prompt_tokens),
            prefill_ms=(time.monotonic() - claimed.claimed_at) * 1000,
        )

    # -- the end of a request --------------------------------------------------------------------------------------

    def _stop(self, request: DecodeRequest, reason: str) -> None:
        """Forget a request; its blocks go back now, or after the passes that use them."""
        request.stopped = reason
        if self._requests.get(request.id) is request:
            del self._requests[request.id]
        claimed = self._local.pop(request, None)
        if claimed is not None:
            self._host.spawn(self._host.jobs.drop(claimed))
        if request.ended_at is None:
            self._scheduler.remove(request)
            record_decode(self._host.tracer, request, worker=self._host.worker_id)
        self._host.jobs.room_changed()
        self._host.device.wake()

    def _fail(self, request: DecodeRequest, message: str) -> None:
        claimed = self._local.pop(request, None)
        self._stop(request, message)
        if claimed is not None:
            self._host.spawn(self._host.jobs.fail(claimed, code="worker_failed", message=message, retryable=True))
            return
        failed = Failed(
            request_id=request.id,
            attempt=request.attempt,
            traceparent=request.job.context,
            worker=self._host.worker_id,
            incarnation=self._host.incarnation,
            code="worker_failed",
            message=message,
            retryable=True,
        )
        self._host.spawn(self._publish_failed(request.job.gateway, failed))

    async def _publish_failed(self, gateway: str, failed: Failed) -> None:
        try:
            await self._host.bus.publish(subjects.gateway(gateway), failed)
        except UnavailableError:
            with in_trace(failed.traceparent):
                log.warning("decode.failure_not_told", extra={"request_id": failed.request_id})

    async def _keep_house(self) -> None:
        """Forget finished streams that no gateway asked for, and look after the leases, until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            for request in list(self._requests.values()):
                if request.ended_at is not None and now - request.ended_at > KEEP_ENDED_S:
                    del self._requests[request.id]
            try:
                await self._intake.look_after_leases(now)
            except Exception:
                log.exception("decode.housekeeping_failed")

    # -- control ---------------------------------------------------------------------------------------------------

    async def handle(self, message: ToWorker) -> WorkerReply | None:
        match message:
            case Reserve():
                return await self._intake.reserve(message)
            case Handoff():
                return await self._intake.hand_over(message)
            case WriterDone():
                return self._intake.writer_done(message)
            case Cancel():
                return Ack(known=await self._cancel(message))
            case Resend():
                return Ack(known=self._resend(message))
            case Received():
                return Ack(known=self._received(message))
            case _:
                return None

    async def _cancel(self, message: Cancel) -> bool:
        self._cancelled.add(message.request_id, message.attempt)
        known = await self._intake.cancel(message.request_id, message.attempt)
        request = self._requests.get(message.request_id)
        if request is None or request.attempt > message.attempt:
            return known
        self._stop(request, "cancelled")
        return True

    def _resend(self, message: Resend) -> bool:
        """Known requests answer with their tokens, if there are any yet; an unknown one is the gateway's to move."""
        request = self._requests.get(message.request_id)
        if request is None or request.attempt != message.attempt:
            return False
        tokens = request.tokens_from(message.position)
        if tokens is not None and tokens.position >= message.position:
            self._host.outbox.add(request.job.gateway, tokens)
        return True

    def _received(self, message: Received) -> bool:
        request = self._requests.get(message.request_id)
        if request is None or request.attempt != message.attempt or request.ended_at is None:
            return False
        del self._requests[message.request_id]
        return True

    async def cancel_all(self, reason: str, *, gateway: str | None = None) -> None:
        for request in list(self._requests.values()):
            if gateway is None or request.job.gateway == gateway:
                self._stop(request, reason)
        await self._intake.cancel_all(gateway=gateway)

    def worker_joined(self, state: WorkerState) -> None:
        """Writers connect to us."""

    def worker_lost(self, worker: str, incarnation: int) -> None:
        self._intake.worker_lost(worker, incarnation)

    def load(self) -> RoleLoad:
        return RoleLoad(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + self._intake.num_leases,
            queued_tokens=sum(max(0, request.sequence.num_unscheduled - 1) for request in self._scheduler),
            held_blocks=self._intake.held_blocks,
            preemptions=self._scheduler.preemptions,
            bad_digests=self._intake.bad_digests,
        )

    def idle(self) -> bool:
        return len(self._scheduler) == 0 and self._intake.num_leases == 0

    async def close(self) -> None:
        self._housekeeping.cancel()
