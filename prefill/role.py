"""The prefill role of a worker: admits prompts to the block pool, computes them in chunks, sends each first token.

`PrefillRole` is called by the pipeline (`plan`, `apply`, `failed`) and by the worker's control. `prefill.handoff` sends
the KV on, one task for each request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as ListOf
from functools import partial

from common.blocks import pack_tokens
from common.errors import InvalidRequestError, UnavailableError
from common.messages import (
    Ack,
    Cancel,
    Dial,
    DialReply,
    Job,
    LeaseAborted,
    Region,
    Resend,
    Tokens,
    ToWorker,
    WorkerReply,
    WorkerState,
    WriterDone,
)
from common.words import Role
from engine.engine import Chunk, Sampled
from engine.sequence import Sequence
from kvtransfer.transport import TransferError
from prefill.handoff import hand_over
from prefill.request import PrefillRequest, note_waits
from prefill.scheduler import FULL_PASS_TOKENS, InFlight, next_chunks, stop_late
from prefill.stop import Stop
from worker.context import Admission, RoleContext
from worker.roles import CancelReason, Computed, RoleLoad
from worker.serving.allocation import HeldBlocks, cover, num_held, publish_computed, sequence_of, withdraw
from worker.serving.checks import check_job
from worker.serving.chunks import schedule
from worker.serving.jobs import Cancelled, ClaimedJob

log = logging.getLogger("baton.prefill")

DIAL_TIMEOUT_S = 1.0
MAX_LINK_WAIT_S = 2.0  # longest wait for links before taking prompts
_STOPS = {
    CancelReason.GATEWAY_LOST: Stop.GATEWAY_LOST,
    CancelReason.BUS_LOST: Stop.BUS_LOST,
    CancelReason.WORKER_STOPPED: Stop.WORKER_STOPPED,
}


class PrefillRole:
    """Owns the requests whose prompts are computed here, from the claim to the accepted handoff."""

    name = Role.PREFILL

    def __init__(self, context: RoleContext, *, max_requests: int = 16) -> None:
        self._context = context
        self._max_requests = max_requests
        self._requests: dict[str, PrefillRequest] = {}  # newest attempts, in order of arrival
        self._tasks: dict[PrefillRequest, asyncio.Task[None]] = {}  # includes older attempts that are ending
        self._in_flight: dict[Sequence, PrefillRequest] = {}
        self.blocks = HeldBlocks(context.cache.pool)
        self._cancelled = Cancelled()
        self._ahead = InFlight()
        self._links: dict[tuple[str, int], float] = {}  # bytes/s measured at opening, by worker and incarnation

    @property
    def requests(self) -> list[PrefillRequest]:
        """Each request's newest attempt, in order of arrival."""
        return list(self._requests.values())

    @property
    def serving(self) -> dict[PrefillRequest, asyncio.Task[None]]:
        """The tasks that follow requests, including older attempts that are ending."""
        return dict(self._tasks)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def takes(self, job: Job) -> bool:
        return bool(job.decode_workers)

    def room(self) -> int:
        """Jobs that could start now: none while a prompt waits for blocks, so that others see the queue.

        Nobody waits for another's grammar, which may take seconds to build, for what comes from elsewhere, or for a twin.
        """
        ready, is_loading = self._context.model.grammars.is_ready, self._context.cache.elsewhere.is_loading
        waiting = [
            one for one in self._requests.values() if not one.admitted and one.admission is not Admission.SHARING
        ]
        if any(ready(request.sequence) and not is_loading(request.sequence) for request in waiting):
            return 0
        return self._max_requests - len(self._tasks)

    async def prepare(self) -> None:
        """Open links to all possible decode workers. A slow link opens at its first push."""
        others = [
            state
            for name, state in self._context.messenger.peers.states.items()
            if name != self._context.identity.worker
        ]
        if others:
            await asyncio.wait(
                [self._context.background.spawn(self._connect(state)) for state in others], timeout=MAX_LINK_WAIT_S
            )

    async def start(self, claimed: ClaimedJob) -> None:
        job = claimed.job
        try:
            check_job(job, vocab_size=self._context.model.vocab_size, max_model_len=self._context.model.max_model_len)
        except InvalidRequestError as error:
            await self._context.jobs.fail(claimed, code=error.code, message=error.message, retryable=False)
            return
        older = self._requests.get(job.request_id)
        if self._cancelled.covers(job) or (older and older.job.attempt >= job.attempt):
            await self._context.jobs.drop(claimed)
            return
        if older is not None:
            older.stop(Stop.SUPERSEDED)  # its push may take a while to finish
            del self._requests[job.request_id]  # re-inserted below, so that the newest comes last
        request = PrefillRequest(claimed=claimed, sequence=sequence_of(job))
        self._requests[job.request_id] = request
        if request.sequence.grammar is not None:
            self._context.background.spawn(self._wake_when_built(request))
        self._context.cache.offered(request.sequence, job)
        self._context.passes.trials.watch(request.sequence, job.gateway, job.context)
        self._context.passes.wake()  # before the reservation: the device should start first
        self._tasks[request] = self._context.background.spawn(self._serve(request))

    async def _wake_when_built(self, request: PrefillRequest) -> None:
        await self._context.model.built(request.sequence)
        self._context.passes.wake()

    async def _serve(self, request: PrefillRequest) -> None:
        """Serve one request to its end and clean up after it."""
        try:
            await hand_over(request, self._context)
        finally:
            while self.blocks.in_use(request.sequence):
                request.changed.clear()
                await request.changed.wait()
            self._context.cache.leaves(request.sequence)
            if not request.is_adopted:
                self.blocks.give_back(request.sequence)
            del self._tasks[request]
            if self._requests.get(request.id) is request:
                del self._requests[request.id]
            self._context.jobs.room_changed()
            self._context.passes.wake()

    # -- the pipeline --------------------------------------------------------------------------------------------------

    def plan(self, token_budget: int) -> list[Chunk]:
        cost = self._context.passes.budget.prompt_cost
        stop_late(self._requests.values(), self._ahead, cost, time.monotonic())
        self._admit_waiting()
        self._context.cache.elsewhere.store_ahead()
        pool, spare = self._context.cache.pool, self._spare_blocks()
        chunks = next_chunks(
            self._requests.values(),
            token_budget,
            full_pass_tokens=cost.full_pass_tokens(FULL_PASS_TOKENS),
            trials=self._context.passes.trials,
            schedule=partial(schedule, pool, spare=spare + pool.fixed),
            cover=partial(cover, pool, spare=spare),
        )
        self._ahead.launched(sum(chunk.num_tokens for chunk in chunks), time.monotonic())
        note_waits(self._requests.values(), time.monotonic())
        for chunk in chunks:
            request = self._requests[chunk.sequence.request_id]
            self.blocks.launched(chunk.sequence)
            self._in_flight[chunk.sequence] = request
            request.started_at = request.started_at or time.monotonic()
        return chunks

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        for chunk, sampled in results:
            request = self._landed(chunk)
            if not request.stopped:
                request.sequence.finish(chunk)
                request.chunks.append((time.monotonic(), chunk.num_tokens))
                publish_computed(self._context.cache.pool, request.sequence)
                if sampled is not None and sampled.prompt_logprobs is not None:
                    request.sequence.scored(chunk, sampled.prompt_logprobs)
                if chunk.sample:
                    self._first_token(request, sampled)
            # Deferred by a loop turn: the first token's frame goes out before the last push holds the thread.
            asyncio.get_running_loop().call_soon(request.changed.set)

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        if chunks:
            self._context.totals.step_failed(error)
        for chunk in chunks:
            self._landed(chunk).stop(Stop.STEP_FAILED, type(error).__name__)

    def _landed(self, chunk: Chunk) -> PrefillRequest:
        """Handle the end of the chunk's pass: its handoff may have blocks to push or give back."""
        request = self._in_flight[chunk.sequence]
        self.blocks.landed(chunk.sequence)
        self._ahead.landed(chunk.num_tokens, time.monotonic())
        if not self.blocks.in_use(chunk.sequence):
            del self._in_flight[chunk.sequence]
        return request

    def _admit_waiting(self) -> None:
        for request in self._requests.values():
            if request.admitted or request.stopped:
                continue
            if not self._context.model.grammars.is_ready(request.sequence):
                request.admission = Admission.BUILDING
                continue
            request.admission = self._context.cache.admit_prompt(
                request.sequence,
                spare=self._spare_blocks(request.sequence),
                ahead=self._context.passes.budget.token_budget + FULL_PASS_TOKENS,
                computing=[one.sequence for one in self._requests.values() if one.is_computing],
            )
            if request.admission in (Admission.LOADING, Admission.SHARING):
                continue
            if request.admission is Admission.NO_ROOM:
                return  # keep the order: short prompts must not starve a long one
            request.admitted = True
            self._context.totals.admitted(request.sequence, prompt_tokens=len(request.sequence.token_ids))
            request.changed.set()
            self._context.jobs.room_changed()

    def _spare_blocks(self, sequence: Sequence | None = None) -> int:
        """Blocks that admission leaves free: one for each sequence decoding here, and one for the next.

        Each can grow by one then, in all groups, before any gives way. Whose turn it is leaves none for those who wait for it.
        """
        others = [role.load() for role in self._context.roles.active if role is not self]
        if not others or self._context.cache.pool.num_used == 0:
            return 0
        waiting = 0 if sequence in self._context.cache.turns.due else sum(load.waiting for load in others)
        return self._context.cache.pool.growth * (1 + waiting + sum(load.running for load in others))

    def _first_token(self, request: PrefillRequest, sampled: Sampled | None) -> None:
        """Send the token to the gateway from here: disaggregation must not add to TTFT."""
        if sampled is None:
            withdraw(self._context.cache.pool, request.sequence)
            request.stop(Stop.STEP_FAILED, "no finite logits")
            return
        if sampled.problem:
            request.stop(Stop.UNFOLLOWABLE, sampled.problem)
            return
        sequence, now = request.sequence, time.monotonic()
        position = sequence.num_generated
        sequence.append(sampled.token_id)
        sequence.propose(sampled.drafts)
        self._context.totals.generated_tokens += 1
        request.first_token, request.first_token_at = sampled.token_id, now
        request.finish = sequence.finish_reason()
        request.told = Tokens(
            request_id=request.id,
            attempt=request.job.attempt,
            position=position,
            token_ids=pack_tokens([sampled.token_id]),
            finish=request.finish,
            logprobs=[sampled.logprobs] if sampled.logprobs else [],
            cached_tokens=min(sequence.num_found or 0, request.job.num_prompt_tokens),
            queue_ms=(request.started_at - request.claimed.claimed_at) * 1000,
            prefill_ms=(now - request.started_at) * 1000,
            waits=request.waits.ms,
            traceparent=request.job.context,
            prompt_logprobs=sequence.prompt_logprobs,
        )
        self._context.outbox.add(request.job.gateway, request.told)

    def adopt(self, prompt: Computed) -> bool:
        """Return False: prompts are only computed here."""
        return False

    # -- control -------------------------------------------------------------------------------------------------------

    async def handle(self, message: ToWorker) -> WorkerReply | None:
        match message:
            case Cancel() if not message.worker:
                return Ack(known=self._cancel(message))
            case Resend():
                request = self._requests.get(message.request_id)
                return Ack(known=self._resend(message), waits=request is not None and request.waits_for_room)
            case LeaseAborted():
                await self._lease_aborted(message)
                return None
            case _:
                return None

    async def _lease_aborted(self, message: LeaseAborted) -> None:
        """Stop the request that writes under the lease (it replies after its write), or report that nobody does."""
        for request in self._tasks:  # an older attempt may still write
            if request.is_of(message) and request.may_write_into(message.worker):
                request.stop(Stop.LEASE_ABORTED, message.reason)
                return
        done = WriterDone(
            **self._context.identity.head(message),
            lease_id=message.lease_id,
            generation=message.generation,
        )
        await self._context.messenger.tell(message.worker, done)

    def _cancel(self, message: Cancel) -> bool:
        request = self._requests.get(message.request_id)
        if request is not None and message.gateway not in ("", request.job.gateway):
            return False
        self._cancelled.add(message)
        if request is None or request.job.attempt > message.attempt:
            return False
        request.stop(Stop.CANCELLED)
        return True

    def _resend(self, message: Resend) -> bool:
        """Resend the first token to a gateway, which moves unknown requests. A decode worker asks about its lease."""
        request = self._requests.get(message.request_id)
        if request is None or request.stopped or not request.is_of(message):
            return False
        if message.worker:
            return request.may_write_into(message.worker)
        if request.told is not None and request.told.position >= message.position:
            self._context.outbox.add(request.job.gateway, request.told)
        return True

    async def cancel_all(self, reason: CancelReason, *, gateway: str | None = None) -> None:
        for request in list(self._tasks):
            if gateway is None or request.job.gateway == gateway:
                request.stop(_STOPS[reason])

    def worker_joined(self, state: WorkerState) -> None:
        """Open a link to a new worker: it may decode later, and no request shall wait for the handshake."""
        if self.name in self._context.roles.names:
            self._context.background.spawn(self._connect(state))

    async def _connect(self, state: WorkerState) -> None:
        try:
            link = await self._context.transfers.connect(await self._region_of(state))
        except (TransferError, UnavailableError) as error:
            log.warning("prefill.no_link", extra={"worker": state.worker, "error": str(error)})
            return
        self._links[state.worker, state.incarnation] = link.bandwidth
        log.info("prefill.linked", extra={"worker": state.worker, "gb_per_s": round(link.bandwidth / 1e9, 2)})

    async def _region_of(self, state: WorkerState) -> Region:
        """The address of a worker's pool. One of release 0.1.0 publishes it. Raises UnavailableError."""
        if self._context.messenger.peers.speaks_unnamed(state.worker):
            return state.region
        identity = self._context.identity
        question = Dial(worker=identity.worker, incarnation=identity.incarnation)
        reply = await self._context.messenger.ask(state.worker, question, timeout_s=DIAL_TIMEOUT_S)
        if not isinstance(reply, DialReply) or reply.region.incarnation != state.incarnation:
            raise UnavailableError(f"{state.worker} did not say how to reach it")
        return reply.region

    def worker_lost(self, worker: str, incarnation: int) -> None:
        self._links.pop((worker, incarnation), None)
        for request in self._tasks:
            request.lost.add((worker, incarnation))
            request.changed.set()  # wakes its handoff, which checks this worker

    def load(self) -> RoleLoad:
        requests = [request for request in self._requests.values() if not request.is_adopted]
        missing = [
            len(request.sequence.token_ids) - request.sequence.num_computed
            for request in requests
            if request.first_token is None
        ]
        return RoleLoad(
            running=sum(request.admitted for request in requests),
            waiting=sum(not request.admitted for request in requests),
            queued_tokens=sum(missing),
            held_blocks=sum(
                num_held(self._context.cache.pool, r.sequence) for r in self._tasks if r.admitted and not r.is_adopted
            ),
            link_bytes_per_s=min(self._links.values(), default=0.0),
        )

    def idle(self) -> bool:
        return not self._tasks

    async def close(self) -> None:
        """Wait for the handoffs, which were already told to stop."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=5.0)
