"""The handoff of one request: reserve at a decode worker during prefill, push finished blocks, send the manifest.

The sans-IO `kvtransfer.sender.Sender` holds the rules; this file does the I/O:

    reserve ──▶ push run, push run, … ──▶ manifest (`Handoff`) ──▶ `Settle` at the gateway, ack the job, free the hold
       └────────────── any failure: no write in flight ──▶ `WriterDone` to the decode worker, `Failed` to the gateway

A failed attempt costs little: the blocks stay in this worker's prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from msgspec import UnsetType

from common.errors import HandoffRefusedError, NobodyListensError, ServingError, UnavailableError
from common.messages import (
    ANYBODY_THERE,
    Handoff,
    HandoffReply,
    Resend,
    ReserveReply,
    WorkerReply,
    WriterDone,
)
from common.tasks import cancel_all
from common.tracing import child_of
from kvtransfer.sender import Sender
from kvtransfer.transport import Link, TransferError, push_run
from prefill.request import HandoffRecord, PrefillRequest, Push, record_prefill
from prefill.reserving import Reserving
from prefill.stop import Stop
from worker.context import RoleContext
from worker.roles import Computed
from worker.serving.allocation import cargo_of
from worker.serving.jobs import HandoffTimes

log = logging.getLogger("baton.handoff")

PUSH_TIMEOUT_S = 10.0
HANDOFF_TIMEOUT_S = 10.0
MANIFEST_TIMEOUT_S = 0.5  # resent after this, so that a dead receiver is noticed soon
NOBODY_LISTENS_PAUSE_S = 0.1  # the receiver may be reconnecting
MAX_NOBODY_LISTENS = 4
MAX_SILENT = 2  # unanswered manifests to a receiver that answers nothing else either
WRITER_DONE_TIMEOUT_S = 1.0


async def hand_over(request: PrefillRequest, context: RoleContext) -> None:
    """Follow `request` until its job is settled, failed or dropped. Never raises; leaves no write in flight."""
    handoff = _HandoffTask(request, context)
    try:
        await handoff.follow()
    except (ServingError, TransferError) as error:
        request.stop(Stop.HANDOFF_FAILED, str(error) or type(error).__name__)
    except Exception as error:
        log.exception("handoff.failed", extra={"request_id": request.id})
        request.stop(Stop.HANDOFF_FAILED, type(error).__name__)
    await handoff.end()


def _needs_decode_worker(request: PrefillRequest) -> bool:
    return request.sequence.num_generated + 1 < request.sequence.sampling.max_tokens


class _HandoffTask:
    def __init__(self, request: PrefillRequest, context: RoleContext) -> None:
        self._request = request
        self._context = context
        self._cargo = cargo_of(context.cache.pool, len(request.sequence.token_ids))
        self._sender = Sender(self._cargo)
        self._record = HandoffRecord()
        self._reserving = Reserving(request, context, self._record)
        self._reservation: asyncio.Task[None] | None = None
        self._decode_worker = ""
        self._lease: ReserveReply | None = None
        self._link: Link | None = None

    @property
    def _trace(self) -> str | UnsetType:
        """The trace context of transfer messages: the transfer's own span, if it has one."""
        return self._record.context or self._request.job.context

    async def follow(self) -> None:
        """Act on each change until the sequence is handed off or the request is stopped."""
        request = self._request
        while not request.stopped:
            request.changed.clear()
            self._ask_for_room()
            if request.finish:
                await self._context.jobs.settle(request.claimed)
                return
            if self._lease is not None and not self._decode_worker_lives():
                request.stop(Stop.DECODER_LOST)
            elif request.expired:
                request.stop(Stop.DEADLINE)
            elif self._stays():
                await self._context.jobs.settle(
                    request.claimed,
                    decode_worker=self._context.identity.worker,
                    decode_incarnation=self._context.identity.incarnation,
                )
                return
            elif await self._push_next():
                continue
            elif self._manifest_is_due():
                await self._pass_on()
                return
            else:
                remaining_ms = max(1, request.claimed.remaining_ms())  # rounded down: 0 would spin
                await _wait(request.changed, remaining_ms / 1000)

    async def end(self) -> None:
        """Clean up here, at the receiver and at other candidates, however the request ended."""
        request, context = self._request, self._context
        if self._reservation is not None:
            await cancel_all([self._reservation])  # a lease may be granted at this very moment
        if request.stopped and not request.is_adopted:
            await self._give_up(request.stopped)
        elif request.finish or request.is_adopted:
            await self._release_lease()
        block_bytes = context.transfers.block_bytes
        record_prefill(context.tracer, request, self._record, worker=context.identity.worker, block_bytes=block_bytes)
        self._reserving.take_back(but=self._decode_worker)

    # -- reservation -----------------------------------------------------------------------------------------------

    def _ask_for_room(self) -> None:
        """Start asking for a lease, once, after the prompt holds its blocks here.

        Otherwise two prompts could deadlock: each would hold the room that the other waits for.
        """
        if self._request.admitted and self._reservation is None and _needs_decode_worker(self._request):
            self._reservation = self._context.background.spawn(self._reserve())

    async def _reserve(self) -> None:
        granted = await self._reserving.lease()
        if granted is None:
            return
        worker, lease = granted
        self._decode_worker, self._lease = worker, lease
        self._request.decode_worker = worker
        self._record.granted_at, self._record.decode_worker = time.monotonic(), worker
        if self._context.tracer.wants(self._request.job.traceparent):
            self._record.context = child_of(self._request.job.traceparent)
        assert lease.region is not None
        try:
            self._sender.reserved(lease)
            self._link = await self._context.transfers.connect(lease.region)
            self._record.link, self._record.link_bytes_per_s = lease.region.transport, self._link.bandwidth
        except HandoffRefusedError as error:
            self._request.stop(Stop.HANDOFF_FAILED, f"{worker}: {error}")
        except TransferError as error:
            self._request.stop(Stop.NO_LINK, f"{worker}: {error}")
        self._request.changed.set()

    def _decode_worker_lives(self) -> bool:
        assert self._lease is not None
        state = self._context.messenger.peers.states.get(self._decode_worker)
        replaced = state is not None and state.incarnation != self._lease.incarnation
        return not replaced and (self._decode_worker, self._lease.incarnation) not in self._request.lost

    def _stays(self) -> bool:
        """True if this worker's decode role takes the sequence over, because nobody else has room.

        It needs no block besides the prompt's own, and may give way there as any other sequence. So no prompt that holds blocks
        where sequences are decoded waits for blocks, here or elsewhere: see docs/architecture.md.
        """
        request = self._request
        if self._lease is None and request.first_token is not None and request.asked_all:
            told = request.told
            assert told is not None
            prompt = Computed(
                job=request.job,
                sequence=request.sequence,
                deadline_at=request.claimed.deadline_at,
                logprobs=told.logprobs,
                cached_tokens=told.cached_tokens,
            )
            request.is_adopted = self._context.roles.adopt(prompt)
        return request.is_adopted

    # -- blocks ----------------------------------------------------------------------------------------------------

    async def _push_next(self) -> bool:
        """Push blocks that are computed and reserved; return False if there were none."""
        sender, sequence = self._sender, self._request.sequence
        sender.computed(sequence.num_computed)
        if self._link is None or self._lease is None:
            return False
        run = sender.next_run()
        if run is None:
            return False
        began = time.monotonic()
        try:
            digests = await push_run(
                self._link,
                run,
                [table.entries for table in sequence.tables],
                lease=(self._lease.lease_id, self._lease.generation),
                timeout_s=min(PUSH_TIMEOUT_S, self._request.claimed.remaining_ms() / 1000),
            )
        except TransferError:
            sender.failed()
            raise
        sender.pushed(run, digests)
        push = Push(began, time.monotonic(), len(run.items))
        self._record.pushes.append(push)
        self._context.totals.pushed(
            blocks=push.num_blocks,
            num_bytes=push.num_blocks * self._context.transfers.block_bytes,
            seconds=push.ended_at - push.began_at,
        )
        return True

    def _manifest_is_due(self) -> bool:
        return self._request.first_token is not None and self._sender.manifest() is not None

    # -- passing on ------------------------------------------------------------------------------------------------

    async def _pass_on(self) -> None:
        """Send the manifest; once it is accepted, settle the job."""
        reply = await self._send_manifest()
        if not reply.accepted:
            self._note_death(lives=self._decode_worker_lives())  # its successor rejects the lease
            raise HandoffRefusedError(reply.reason, f"{self._decode_worker} refused the handoff")
        assert self._lease is not None
        self._sender.handed_off()
        self._record.accepted_at = time.monotonic()
        await self._context.jobs.settle(
            self._request.claimed,
            decode_worker=self._decode_worker,
            decode_incarnation=self._lease.incarnation,
            times=self._times(),
        )

    def _times(self) -> HandoffTimes:
        known_at = self._request.first_token_at
        return HandoffTimes(
            push_ms=self._record.push_ms,
            late_push_ms=self._record.late_push_ms(known_at),
            handover_ms=1000 * (time.monotonic() - known_at),
        )

    async def _send_manifest(self) -> HandoffReply:
        request, lease, digests = self._request, self._lease, self._sender.manifest()
        assert lease is not None
        assert digests is not None
        assert request.first_token is not None
        message = Handoff(
            **self._context.identity.head(request.job, trace=self._trace),
            decode_incarnation=lease.incarnation,
            lease_id=lease.lease_id,
            generation=lease.generation,
            digests=digests,
            first_token=request.first_token,
            first_logprobs=request.told.logprobs[0] if request.told and request.told.logprobs else None,
            remaining_ms=request.claimed.remaining_ms(),
            num_cached_tokens=request.sequence.num_found or 0,
            drafts=request.sequence.proposed[1],
        )
        return await self._until_answered(message)

    async def _until_answered(self, message: Handoff) -> HandoffReply:
        """Send the manifest until it is answered; a repeated one gets the first answer. A client waits for its second token."""
        give_up_at = time.monotonic() + min(HANDOFF_TIMEOUT_S, self._request.claimed.remaining_ms() / 1000)
        nobody = silent = 0
        while (
            time.monotonic() < give_up_at and nobody < MAX_NOBODY_LISTENS and silent < MAX_SILENT and self._is_wanted()
        ):
            try:
                reply = await self._ask_receiver(message)
                if isinstance(reply, HandoffReply):
                    return reply
            except NobodyListensError:
                nobody += 1
                await asyncio.sleep(NOBODY_LISTENS_PAUSE_S)
            except UnavailableError:
                silent = 0 if await self._receiver_answers() else silent + 1
        stands_still = nobody < MAX_NOBODY_LISTENS and self._decode_worker_lives()  # false if it died
        self._note_death(lives=stands_still)
        raise UnavailableError(f"{self._decode_worker} did not answer the handoff")

    def _is_wanted(self) -> bool:
        return not self._request.stopped and self._decode_worker_lives()

    async def _receiver_answers(self) -> bool:
        """True if the receiver is alive, only busy with the manifest. Asks it about no request."""
        try:
            await self._ask_receiver(ANYBODY_THERE)
        except UnavailableError:
            return False
        return True

    async def _ask_receiver(self, message: Handoff | Resend) -> WorkerReply:
        timeout_s = min(MANIFEST_TIMEOUT_S, max(0.001, self._request.claimed.remaining_ms() / 1000))
        return await self._context.messenger.ask(self._decode_worker, message, timeout_s=timeout_s)

    def _note_death(self, *, lives: bool) -> None:
        """Record for the gateway that the decode worker died during this handoff, unless it was told to stop."""
        if (
            not lives
            and self._lease
            and not self._context.messenger.peers.left(self._decode_worker, self._lease.incarnation)
        ):
            self._request.dead_worker = self._decode_worker

    # -- giving up -------------------------------------------------------------------------------------------------

    async def _give_up(self, stop: Stop) -> None:
        """Release the lease at the receiver, with no write in flight, and tell the gateway if it still wants the request."""
        request = self._request
        self._sender.abort()
        # A background task: the receiver may be dead, and the client waits.
        releasing = self._context.background.spawn(self._release_lease())
        if stop.error is None:
            await self._context.jobs.drop(request.claimed)
        else:
            await self._context.jobs.fail(
                request.claimed,
                code=stop.error.code,
                message=request.why_stopped,
                retryable=stop.error.retryable,
                dead_worker=request.dead_worker,
            )
        await asyncio.wait([releasing])
        log.info("prefill.gave_up", extra={"request_id": request.id, "reason": request.why_stopped})

    async def _release_lease(self) -> None:
        """Report that no write will follow. A receiver that misses it asks later."""
        lease = self._lease
        if lease is None:
            return
        done = WriterDone(
            **self._context.identity.head(self._request.job, trace=self._trace),
            lease_id=lease.lease_id,
            generation=lease.generation,
        )
        with contextlib.suppress(UnavailableError):
            await self._context.messenger.ask(self._decode_worker, done, timeout_s=WRITER_DONE_TIMEOUT_S)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
