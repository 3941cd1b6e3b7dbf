"""The hand-over of one request: reserve at the decode worker while the prompt is computed, push finished blocks, pass on.

What may follow what is the sans-IO `kvtransfer.sender.Sender`; this file does its I/O:

    reserve ──▶ push run, push run, … ──▶ manifest (`Handoff`) ──▶ `Settle` at the gateway, ack the job, free the hold
       └────────────── any failure: no write in flight ──▶ `WriterDone` to the decode worker, `Failed` to the gateway

A failed attempt costs little: the blocks stay in this worker's prefix cache, and the gateway decides about another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from msgspec import UnsetType

from common import subjects
from common.errors import (
    HandoffRefusedError,
    NobodyListensError,
    PlaceAgainError,
    ServingError,
    UnavailableError,
    WorkerFailedError,
)
from common.lifecycle import cancel_all
from common.messages import (
    ANYBODY_THERE,
    Cancel,
    Handoff,
    HandoffReply,
    Resend,
    Reserve,
    ReserveReply,
    WorkerReply,
    WriterDone,
    worker_reply_decoder,
)
from common.tracing import child_of
from kvtransfer.sender import Sender
from kvtransfer.transport import Link, TransferError
from prefill.request import PrefillRequest
from prefill.spans import HandoverRecord, Push, record_prefill
from worker.host import WorkerHost
from worker.jobs import HandoverTimes

log = logging.getLogger("baton.handoff")

RESERVE_TIMEOUT_S = 1.0
RESERVE_AGAIN_S = 0.05  # every candidate was full: ask again after this
SILENT_ROUNDS = 5  # nobody even answers
WANTED_S = 2.0  # who waits for room for so long asks whether somebody still waits for it, each time again
PUSH_TIMEOUT_S = 10.0
HANDOFF_TIMEOUT_S = 10.0
HANDOFF_ASK_S = (
    0.5  # without an answer the manifest is sent again: verifying may take longer, a dead receiver shows at once
)
NOBODY_AGAIN_S, MAX_NOBODY = 0.1, 4  # nobody listens: it may just connect again
MAX_SILENT = 2  # unanswered manifests of a receiver that doesn't answer another question either
WRITER_DONE_TIMEOUT_S = 1.0

NOBODY_DECODES = "no candidate takes sequences any more"
NOBODY_ANSWERS = "no decode worker answers"
CANCELLED = "cancelled"  # by the gateway, which told all candidates: one that heard it is enough
_FINAL = ("draining", "handed over", "incompatible")  # answers that asking again doesn't change
_UNWANTED = (CANCELLED, "superseded", "gateway lost", "deadline")  # reasons after which nobody waits for an answer


async def hand_over(request: PrefillRequest, host: WorkerHost) -> None:
    """Follow `request` until its job is settled, failed or dropped. Never raises; leaves no write in flight."""
    handover = _Handover(request, host)
    try:
        await handover.follow()
    except (ServingError, TransferError) as error:
        request.stop(str(error) or type(error).__name__)
    except Exception as error:
        log.exception("handoff.failed", extra={"request_id": request.id})
        request.stop(f"hand-over failed: {type(error).__name__}")
    await cancel_all(handover.reserving)  # a lease may have been granted at this very moment
    if request.stopped:
        await handover.give_up()
    elif request.finish:
        await handover.release_lease()
    record_prefill(
        host.tracer,
        request,
        handover.record,
        worker=host.worker_id,
        block_bytes=host.engine.layout.block_bytes,
    )
    await handover.forget_silent()


def _needs_decode_worker(request: PrefillRequest) -> bool:
    return request.sequence.num_generated + 1 < request.job.sampling.max_tokens


class _Handover:
    def __init__(self, request: PrefillRequest, host: WorkerHost) -> None:
        self._request = request
        self._host = host
        self._sender = Sender(num_tokens=len(request.sequence.token_ids), block_size=host.pool.block_size)
        self._link: Link | None = None
        self._decode_worker = ""
        self.reserving: list[asyncio.Task[None]] = []  # one at most
        self._silent: set[str] = set()  # asked for room, and no answer yet, or not in time
        self._reply: ReserveReply | None = None
        self.record = HandoverRecord()

    @property
    def _context(self) -> str | UnsetType:
        """Of messages about the transfer: its own span's, where it has one."""
        return self.record.context or self._request.job.context

    async def follow(self) -> None:
        request = self._request
        while not request.stopped:
            request.changed.clear()
            self._ask_for_room()
            if request.finish:
                await self._host.jobs.settle(request.claimed)
                return
            if self._reply is not None and not self._decode_worker_lives():
                request.stop("decode worker lost")
            elif request.expired:
                request.stop("deadline")
            elif await self._push_next():
                continue
            elif self._manifest_is_due():
                await self._pass_on()
                return
            else:
                remaining_ms = max(1, request.claimed.remaining_ms())  # rounded down: 0 would spin
                await _wait(request.changed, remaining_ms / 1000)

    # -- reservation -----------------------------------------------------------------------------------------------

    def _ask_for_room(self) -> None:
        """Once, and not before the prompt has its blocks here: one that has room there and waits for blocks here would keep both
        from one that has blocks here and waits for room there.
        """
        if self._request.admitted and not self.reserving and _needs_decode_worker(self._request):
            self.reserving.append(self._host.spawn(self.reserve()))

    async def reserve(self) -> None:
        """Ask the candidates, best first, round after round, until one grants a lease.

        The attempt ends when none of them takes sequences any more: because it refuses for good, or is silent round after round;
        and when it is over for the gateway, which may have said so while this worker was cut off.
        """
        request, hopeless_rounds = self._request, 0
        self.record.asked_at = wanted_at = time.monotonic()
        while not request.stopped:
            silent = leaving = refused = 0
            for worker in request.job.decode_workers:
                reply = await self._ask(worker)
                if reply is None:
                    silent += 1
                    continue
                if reply.granted and reply.region is not None:
                    await self._granted(worker, reply)
                    return
                self.record.refusals += 1
                if reply.reason == CANCELLED:
                    request.stop(CANCELLED)
                    return
                leaving += reply.reason == "draining"
                refused += reply.reason in _FINAL
            if leaving == len(request.job.decode_workers):
                request.stop(NOBODY_DECODES)
                return
            if refused == len(request.job.decode_workers):
                request.stop("every candidate refuses the attempt for good")
                return
            hopeless_rounds = hopeless_rounds + 1 if silent + refused == len(request.job.decode_workers) else 0
            if hopeless_rounds >= SILENT_ROUNDS:
                request.stop(NOBODY_DECODES if leaving else NOBODY_ANSWERS)
                return
            if time.monotonic() - wanted_at > WANTED_S:
                wanted_at = time.monotonic()
                if not await self._host.jobs.is_wanted(request.claimed):
                    request.stop("superseded")
                    return
            await asyncio.sleep(RESERVE_AGAIN_S)

    async def _ask(self, worker: str) -> ReserveReply | None:
        message = Reserve(
            job=self._request.job,
            worker=self._host.worker_id,
            incarnation=self._host.incarnation,
            remaining_ms=self._request.claimed.remaining_ms(),
            layout=self._host.engine.layout,
        )
        was_silent = worker in self._silent
        self._silent.add(worker)  # the request may end before the answer comes
        try:
            reply = await self._host.bus.request(
                subjects.worker(worker), message, worker_reply_decoder, timeout_s=RESERVE_TIMEOUT_S
            )
        except UnavailableError:
            return None
        if not was_silent:  # what it did not answer may reach it after this
            self._silent.discard(worker)
        return reply if isinstance(reply, ReserveReply) else None

    async def _granted(self, worker: str, reply: ReserveReply) -> None:
        assert reply.region is not None
        self._decode_worker, self._reply = worker, reply
        self._sender.reserved(reply)
        self.record.granted_at, self.record.decode_worker = time.monotonic(), worker
        if self._host.tracer.wants(self._request.job.traceparent):
            self.record.context = child_of(self._request.job.traceparent)
        try:
            self._link = await self._host.transport.connect(reply.region)
            self.record.link, self.record.link_bytes_per_s = reply.region.transport, self._link.bandwidth
        except TransferError as error:
            self._request.stop(f"no link to {worker}: {error}")
        self._request.changed.set()

    def _decode_worker_lives(self) -> bool:
        assert self._reply is not None
        state = self._host.peers.states.get(self._decode_worker)
        replaced = state is not None and state.incarnation != self._reply.incarnation
        return not replaced and (self._decode_worker, self._reply.incarnation) not in self._request.lost

    # -- blocks ----------------------------------------------------------------------------------------------------

    async def _push_next(self) -> bool:
        """Push the blocks that are computed, reserved and not yet sent; return whether there were any."""
        sender, sequence = self._sender, self._request.sequence
        sender.computed(sequence.num_computed)
        if self._link is None or self._reply is None:
            return False
        run = sender.next_run()
        if run is None:
            return False
        began = time.monotonic()
        try:
            digests = await self._link.push(
                lease_id=self._reply.lease_id,
                generation=self._reply.generation,
                source_blocks=[sequence.block_table[index] for index in run.indices],
                destination_blocks=run.destination_blocks,
                timeout_s=min(PUSH_TIMEOUT_S, self._request.claimed.remaining_ms() / 1000),
            )
        except TransferError:
            sender.failed()
            raise
        sender.pushed(run, digests)
        push = Push(began, time.monotonic(), len(run.indices))
        self.record.pushes.append(push)
        self._host.totals.pushed(
            blocks=push.num_blocks,
            num_bytes=push.num_blocks * self._host.engine.layout.block_bytes,
            seconds=push.ended_at - push.began_at,
        )
        return True

    def _manifest_is_due(self) -> bool:
        return self._request.first_token is not None and self._sender.manifest() is not None

    # -- passing on ------------------------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """Send the manifest; when it is accepted the sequence is the decode worker's, and the job is settled."""
        reply = await self._send_manifest()
        if not reply.accepted:
            self._note_death(lives=self._decode_worker_lives())  # its successor refuses what it was promised
            raise HandoffRefusedError(f"{self._decode_worker} refused the hand-over: {reply.reason}")
        assert self._reply is not None
        self._sender.handed_off()
        self.record.accepted_at = time.monotonic()
        await self._host.jobs.settle(
            self._request.claimed,
            decode_worker=self._decode_worker,
            decode_incarnation=self._reply.incarnation,
            times=self._times(),
        )

    def _times(self) -> HandoverTimes:
        known_at = self._request.first_token_at
        return HandoverTimes(
            push_ms=self.record.push_ms,
            late_push_ms=self.record.late_push_ms(known_at),
            handover_ms=1000 * (time.monotonic() - known_at),
        )

    async def _send_manifest(self) -> HandoffReply:
        request, lease, digests = self._request, self._reply, self._sender.manifest()
        assert lease is not None
        assert digests is not None
        assert request.first_token is not None
        message = Handoff(
            request_id=request.id,
            attempt=request.job.attempt,
            traceparent=self._context,
            worker=self._host.worker_id,
            incarnation=self._host.incarnation,
            decode_incarnation=lease.incarnation,
            lease_id=lease.lease_id,
            generation=lease.generation,
            digests=digests,
            first_token=request.first_token,
            first_logprobs=request.told.logprobs[0] if request.told and request.told.logprobs else None,
            remaining_ms=request.claimed.remaining_ms(),
            num_cached_tokens=request.sequence.num_cached,
        )
        return await self._until_answered(message)

    async def _until_answered(self, message: Handoff) -> HandoffReply:
        """Send the manifest until it is answered, a repeated one as the first. A client waits for its second token."""
        give_up_at = time.monotonic() + min(HANDOFF_TIMEOUT_S, self._request.claimed.remaining_ms() / 1000)
        nobody = silent = 0
        while time.monotonic() < give_up_at and nobody < MAX_NOBODY and silent < MAX_SILENT and self._is_wanted():
            try:
                reply = await self._ask_receiver(message)
                if isinstance(reply, HandoffReply):
                    return reply
            except NobodyListensError:
                nobody += 1
                await asyncio.sleep(NOBODY_AGAIN_S)
            except UnavailableError:
                silent = 0 if await self._receiver_answers() else silent + 1
        self._note_death(lives=nobody < MAX_NOBODY and self._decode_worker_lives())  # who only stands still did not die
        raise UnavailableError(f"{self._decode_worker} did not answer the hand-over")

    def _is_wanted(self) -> bool:
        return not self._request.stopped and self._decode_worker_lives()

    async def _receiver_answers(self) -> bool:
        """Whether it is busy with the manifest, rather than not there; told by a question about no request."""
        try:
            await self._ask_receiver(ANYBODY_THERE)
        except UnavailableError:
            return False
        return True

    async def _ask_receiver(self, message: Handoff | Resend) -> WorkerReply:
        timeout_s = min(HANDOFF_ASK_S, max(0.001, self._request.claimed.remaining_ms() / 1000))
        return await self._host.bus.request(
            subjects.worker(self._decode_worker), message, worker_reply_decoder, timeout_s=timeout_s
        )

    def _note_death(self, *, lives: bool) -> None:
        """The gateway must know if the decode worker died over this sequence, unless it was told to stop."""
        if not lives and self._reply and not self._host.peers.left(self._decode_worker, self._reply.incarnation):
            self._request.dead_worker = self._decode_worker

    # -- giving up -------------------------------------------------------------------------------------------------

    async def give_up(self) -> None:
        """No write is in flight any more: free the lease at the receiver, tell the gateway if it still cares."""
        request = self._request
        self._sender.abort()
        releasing = self._host.spawn(self.release_lease())  # its receiver may be dead, and the client waits
        if request.stopped in _UNWANTED:
            await self._host.jobs.drop(request.claimed)
        else:
            elsewhere = request.stopped in (NOBODY_DECODES, NOBODY_ANSWERS)  # that counts as no attempt
            code = (PlaceAgainError if elsewhere else WorkerFailedError).code
            await self._host.jobs.fail(
                request.claimed, code=code, message=request.stopped, retryable=True, dead_worker=request.dead_worker
            )
        await asyncio.wait([releasing])
        log.info("prefill.gave_up", extra={"request_id": request.id, "reason": request.stopped})

    async def forget_silent(self) -> None:
        """Tell candidates that did not answer that the question is over: one that was only stopped would grant a lease later."""
        request = self._request
        cancel = Cancel(
            request_id=request.id,
            attempt=request.job.attempt,
            traceparent=request.job.context,
            reason="reserved elsewhere",
        )
        for worker in self._silent - {self._decode_worker}:
            self._host.spawn(self._tell(worker, cancel))

    async def release_lease(self) -> None:
        lease = self._reply
        if lease is None:
            return
        done = WriterDone(
            request_id=self._request.id,
            attempt=self._request.job.attempt,
            traceparent=self._context,
            worker=self._host.worker_id,
            incarnation=self._host.incarnation,
            lease_id=lease.lease_id,
            generation=lease.generation,
        )
        await self._tell(self._decode_worker, done)

    async def _tell(self, worker: str, message: WriterDone | Cancel) -> None:
        """Say that something is over. Who doesn't hear it asks in time: decode workers look after their leases."""
        with contextlib.suppress(UnavailableError):
            await self._host.bus.request(
                subjects.worker(worker), message, worker_reply_decoder, timeout_s=WRITER_DONE_TIMEOUT_S
            )


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
