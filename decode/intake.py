"""How KV comes in: grant a lease, let the writer fill it, verify the manifest, give the sequence to the batch.

The rules are the sans-IO `kvtransfer.lease.LeaseTable`: blocks under a lease belong to the *transfer* until it ended; after
an abort they stay in quarantine until no write can land any more. This file does the I/O and the memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import UnsetType

from common import subjects
from common.blocks import hash_blocks, pack_tokens
from common.errors import HandoffRefusedError, InvalidRequestError, UnavailableError
from common.messages import (
    Ack,
    Handoff,
    HandoffReply,
    Imported,
    Job,
    LeaseAborted,
    Region,
    Resend,
    Reserve,
    ReserveReply,
    WriterDone,
    worker_reply_decoder,
)
from decode.request import DecodeRequest
from decode.spans import record_verification
from engine.block_pool import OutOfBlocksError
from engine.sequence import Sequence
from kvtransfer.digest import block_digests
from kvtransfer.lease import Lease, LeaseState, LeaseTable
from worker.checks import check_job
from worker.host import WorkerHost
from worker.prefix import blocks_for, publish_computed, sequence_of
from worker.tombstones import Tombstones

log = logging.getLogger("baton.intake")

LEASE_S = 30.0  # longest time from a reservation to its manifest
ASK_WRITER_S = 2.0  # so often the writer is asked whether it still knows of its lease
ANSWER_S = 1.0
NO_TOKENS = 2**31  # no stream gets there: a `Resend` from this position sends nothing
MAX_VERDICTS = 1_000  # answers kept for repeated manifests


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """What a lease stands for: the job, and its prompt's blocks in order."""

    lease: Lease
    job: Job
    sequence: Sequence  # the job's, without blocks until the lease is accepted
    cached: list[int]  # verified blocks that were here already; one reference each is ours
    digests: list[bytes]  # of `cached`
    num_pushed: int  # blocks that the writer fills: the first ones of the lease
    deadline_at: float
    granted_at: float
    ask_at: float  # whether its writer still knows of it
    reply: ReserveReply
    writer_region: Region | None  # remembered: the live table forgets a lost writer, whose lease must still be fenced


class Intake:
    """Answers `Reserve`, `Handoff` and `WriterDone` for the decode role."""

    def __init__(
        self,
        host: WorkerHost,
        *,
        running: Callable[[], int],
        cancelled: Tombstones,
        activate: Callable[[DecodeRequest], None],
    ) -> None:
        self._host = host
        self._running = running
        self._cancelled = cancelled
        self._activate = activate
        self._table = LeaseTable(incarnation=host.incarnation)
        self._reservations: dict[int, Reservation] = {}  # by lease id, until the lease ended
        self._verdicts: OrderedDict[tuple[int | str, ...], asyncio.Task[HandoffReply]] = OrderedDict()
        self._accepted = Tombstones()
        self.bad_digests = 0

    @property
    def num_leases(self) -> int:
        """Reservations that may still become sequences."""
        return sum(r.lease.state in (LeaseState.RESERVED, LeaseState.VERIFYING) for r in self._reservations.values())

    @property
    def held_blocks(self) -> int:
        """Blocks that leases and quarantine keep from everybody else."""
        return self._table.held_blocks

    # -- reserve -----------------------------------------------------------------------------------------------------

    async def reserve(self, message: Reserve) -> ReserveReply:
        """Grant a lease for the whole prompt and the first generated token, or say why not. Repeating it changes nothing."""
        job = message.job
        refusal = self._refusal(message)
        if refusal:
            return ReserveReply(granted=False, reason=refusal)
        known = self._known(message)
        if known is not None:
            return known.reply
        sequence = sequence_of(job)
        size, pool = self._host.pool.block_size, self._host.pool
        digests = hash_blocks(job.hash_root, sequence.token_ids, size)
        cached = pool.match_prefix(digests)
        num_fresh = blocks_for(len(sequence.token_ids) + 1, size) - len(cached)
        try:
            fresh = pool.allocate(num_fresh, spare=self._running())  # a block for each running sequence comes first
        except OutOfBlocksError:
            pool.release(cached)
            return ReserveReply(granted=False, reason="full")
        return self._grant(message, sequence, cached, digests[: len(cached)], fresh)

    def _refusal(self, message: Reserve) -> str:
        job, settings = message.job, self._host.settings
        if not self._host.takes("decode"):
            return "draining"
        if not self._host.engine.layout.compatible_with(message.layout):
            return "incompatible"
        if self._cancelled.covers(job.request_id, job.attempt):
            return "cancelled"
        if self._accepted.covers(job.request_id, job.attempt):
            return "handed over"  # a late repetition, whose lease nobody would end before its time
        if self._writer_region(message.worker, message.incarnation) is None:
            return "unknown writer"  # its heartbeat is on the way; a lease needs to know how to tell that the writer is gone
        try:
            check_job(job, vocab_size=self._host.engine.vocab_size, max_model_len=self._host.max_model_len)
        except InvalidRequestError as error:
            return f"invalid: {error.message}"
        if self._known(message) is None and self._running() + self.num_leases >= settings.max_sequences:
            return "full"
        return ""

    def _known(self, message: Reserve) -> Reservation | None:
        for reservation in self._reservations.values():
            lease = reservation.lease
            if (
                reservation.job.request_id == message.job.request_id
                and reservation.job.attempt == message.job.attempt
                and (lease.writer, lease.writer_incarnation) == (message.worker, message.incarnation)
                and lease.state is LeaseState.RESERVED
            ):
                return reservation
        return None

    def _grant(
        self, message: Reserve, sequence: Sequence, cached: list[int], digests: list[bytes], fresh: list[int]
    ) -> ReserveReply:
        job, now, host = message.job, time.monotonic(), self._host
        lease_s = min(LEASE_S, message.remaining_ms / 1000)
        try:
            lease = self._table.reserve(
                now,
                request_id=job.request_id,
                attempt=job.attempt,
                writer=message.worker,
                writer_incarnation=message.incarnation,
                blocks=fresh,
                expires_at=now + lease_s,
            )
        except HandoffRefusedError as error:
            host.pool.release(cached + fresh)
            return ReserveReply(granted=False, reason=error.message)
        num_pushed = blocks_for(len(sequence.token_ids), host.pool.block_size) - len(cached)
        host.transport.expect(lease.lease_id, lease.generation, fresh[:num_pushed])
        reply = ReserveReply(
            granted=True,
            incarnation=host.incarnation,
            lease_id=lease.lease_id,
            generation=lease.generation,
            first_block=len(cached),
            destination_blocks=pack_tokens(fresh[:num_pushed]),
            lease_ms=int(lease_s * 1000),
            region=host.region,
        )
        self._reservations[lease.lease_id] = Reservation(
            lease=lease,
            job=job,
            sequence=sequence,
            cached=cached,
            digests=digests,
            num_pushed=num_pushed,
            deadline_at=now + message.remaining_ms / 1000,
            granted_at=now,
            ask_at=now + ASK_WRITER_S,
            reply=reply,
            writer_region=self._writer_region(message.worker, message.incarnation),
        )
        return reply

    # -- manifest ----------------------------------------------------------------------------------------------------

    async def hand_over(self, message: Handoff) -> HandoffReply:
        """Verify and activate, once: a repeated manifest gets the first one's answer."""
        # all of who says it: what somebody else or an older process said of the lease decides nothing for its writer
        key = (
            message.lease_id, message.generation, message.request_id, message.attempt,
            message.worker, message.incarnation, message.decode_incarnation,
        )  # fmt: skip
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._host.spawn(self._verify_recorded(message))
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return await asyncio.shield(verdict)

    async def _verify_recorded(self, message: Handoff) -> HandoffReply:
        began_at = time.monotonic()
        reply = await self._verify(message)
        self._host.totals.refused_handoffs += not reply.accepted
        record_verification(
            self._host.tracer, message, worker=self._host.worker_id, began_at=began_at, refusal=reply.reason
        )
        return reply

    async def _verify(self, message: Handoff) -> HandoffReply:
        if message.decode_incarnation != self._host.incarnation:
            return HandoffReply(accepted=False, reason="stale")
        try:
            self._table.begin_verify(
                time.monotonic(),
                lease_id=message.lease_id,
                generation=message.generation,
                request_id=message.request_id,
                attempt=message.attempt,
                writer=message.worker,
                writer_incarnation=message.incarnation,
            )
        except HandoffRefusedError as error:
            return HandoffReply(accepted=False, reason=error.message)
        reservation = self._reservations[message.lease_id]
        reason = await self._check(reservation, message)
        self._host.transport.forget(message.lease_id, message.generation)
        if reservation.lease.cancelled or self._cancelled.covers(message.request_id, message.attempt):
            reason = "cancelled"
        if reason:
            self._give_back(reservation, self._table.reject(message.lease_id))
            return HandoffReply(accepted=False, reason=reason)
        self._accept(reservation, message)
        return HandoffReply(accepted=True)

    async def _check(self, reservation: Reservation, message: Handoff) -> str:
        """The reason to refuse, or "": every pushed block arrived and has the digest that its writer computed."""
        wait_s = max(0.0, min(5.0, message.remaining_ms / 1000))
        if not await self._host.transport.arrived(message.lease_id, message.generation, wait_s):
            return "incomplete"
        pushed = reservation.lease.blocks[: reservation.num_pushed]
        if len(message.digests) != 8 * len(pushed):
            return "incomplete"
        digests = await asyncio.to_thread(block_digests, self._host.engine.kv, pushed)
        if digests != message.digests:
            self.bad_digests += 1
            log.error("intake.bad_digest", extra={"request_id": message.request_id, "writer": message.worker})
            return "digest"
        if not 0 <= message.first_token < self._host.engine.vocab_size:
            return "invalid"
        return ""

    def _accept(self, reservation: Reservation, message: Handoff) -> None:
        blocks = self._table.accept(message.lease_id)
        self._accepted.add(message.request_id, message.attempt)
        del self._reservations[message.lease_id]
        job, sequence = reservation.job, reservation.sequence
        sequence.block_table = reservation.cached + blocks
        sequence.digests = list(reservation.digests)
        sequence.num_cached = len(reservation.cached) * self._host.pool.block_size
        sequence.restart(len(sequence.token_ids))
        publish_computed(self._host.pool, sequence)
        knows_first = job.sampling.logprobs is None or message.first_logprobs is not None
        request = DecodeRequest(
            job=job,
            sequence=sequence,
            deadline_at=reservation.deadline_at,
            first_position=sequence.num_generated + (not knows_first),
            logprobs=[message.first_logprobs] if message.first_logprobs is not None else [],
            cached_tokens=min(message.num_cached_tokens, job.num_prompt_tokens),
        )
        sequence.append(message.first_token)
        self._activate(request)
        self._host.spawn(self._tell_imported(reservation, message.traceparent or job.context))

    async def _tell_imported(self, reservation: Reservation, traceparent: str | UnsetType) -> None:
        imported = Imported(
            request_id=reservation.job.request_id,
            attempt=reservation.job.attempt,
            traceparent=traceparent,
            worker=self._host.worker_id,
            incarnation=self._host.incarnation,
            transferred_blocks=reservation.num_pushed,
            transferred_bytes=reservation.num_pushed * self._host.engine.layout.block_bytes,
            reused_blocks=len(reservation.cached),
            transfer_ms=(time.monotonic() - reservation.granted_at) * 1000,
        )
        try:
            await self._host.bus.publish(subjects.gateway(reservation.job.gateway), imported)
        except UnavailableError:
            log.warning("intake.import_not_told", extra={"request_id": reservation.job.request_id})

    # -- abort, quarantine, release ----------------------------------------------------------------------------------

    def writer_done(self, message: WriterDone) -> Ack:
        """The writer gave the lease up: its blocks are free at once."""
        freed = self._table.writer_done(
            lease_id=message.lease_id, generation=message.generation, writer_incarnation=message.incarnation
        )
        reservation = self._reservations.get(message.lease_id)
        if reservation is None or reservation.lease.state is not LeaseState.RELEASED:
            return Ack(known=False)
        self._host.transport.forget(message.lease_id, message.generation)
        self._give_back(reservation, freed)
        return Ack(known=True)

    async def cancel(self, request_id: str, attempt: int) -> bool:
        """Abort the request's lease; its blocks wait in quarantine until the writer can't write any more."""
        lease = self._table.cancel(time.monotonic(), request_id, attempt)
        if lease is None:
            return False
        await self._abort(lease, "cancelled")
        return True

    async def cancel_all(self, *, gateway: str | None) -> None:
        for reservation in list(self._reservations.values()):
            if gateway is None or reservation.job.gateway == gateway:
                await self.cancel(reservation.job.request_id, reservation.job.attempt)

    async def look_after_leases(self, now: float) -> None:
        """Expire leases; ask the writers of quarantined ones to stop, again and again, until they answer or are gone.

        A writer may not know of its lease, or no more: it asked, gave up, and the question was taken late; or it said that
        it is done, and nobody heard. So the writers of open leases are asked, too.
        """
        self._table.expire(now)
        for reservation in list(self._reservations.values()):
            state = reservation.lease.state
            if state is LeaseState.QUARANTINED:
                await self._abort(reservation.lease, "expired or cancelled")
            elif state is LeaseState.RESERVED and now >= reservation.ask_at:
                reservation.ask_at = now + ASK_WRITER_S
                self._host.spawn(self._ask_writer(reservation))

    async def _ask_writer(self, reservation: Reservation) -> None:
        lease = reservation.lease
        question = Resend(
            request_id=lease.request_id,
            attempt=lease.attempt,
            traceparent=reservation.job.context,
            position=NO_TOKENS,
        )
        try:
            reply = await self._host.bus.request(
                subjects.worker(lease.writer), question, worker_reply_decoder, timeout_s=ANSWER_S
            )
        except UnavailableError:
            return  # a writer that is gone is another matter, see `worker_lost`
        if isinstance(reply, Ack) and not reply.known and self._table.give_up(lease.lease_id):
            await self._abort(lease, "its writer does not know of it")

    def worker_lost(self, worker: str, incarnation: int) -> None:
        """A silent writer is not a dead one: only when no write of it can land do its blocks go back."""
        for reservation in list(self._reservations.values()):
            lease = reservation.lease
            if (lease.writer, lease.writer_incarnation) == (worker, incarnation):
                self._release_if_writer_gone(reservation)

    async def _abort(self, lease: Lease, reason: str) -> None:
        self._host.transport.forget(lease.lease_id, lease.generation)
        reservation = self._reservations.get(lease.lease_id)
        if reservation is None or self._release_if_writer_gone(reservation):
            return
        message = LeaseAborted(
            request_id=lease.request_id,
            attempt=lease.attempt,
            traceparent=reservation.job.context,
            worker=self._host.worker_id,
            incarnation=self._host.incarnation,
            lease_id=lease.lease_id,
            generation=lease.generation,
            reason=reason,
        )
        try:
            await self._host.bus.publish(subjects.worker(lease.writer), message)
        except UnavailableError:
            log.debug("intake.abort_not_told", extra={"writer": lease.writer})

    def _release_if_writer_gone(self, reservation: Reservation) -> bool:
        """End this lease, and no other of its writer, if nothing can land under it any more once it is forgotten."""
        lease = reservation.lease
        if lease.state is LeaseState.VERIFYING or not self._host.transport.writer_gone(reservation.writer_region):
            return False
        self._host.transport.forget(lease.lease_id, lease.generation)
        freed = self._table.writer_done(
            lease_id=lease.lease_id, generation=lease.generation, writer_incarnation=lease.writer_incarnation
        )
        self._give_back(reservation, freed)
        return True

    def _writer_region(self, worker: str, incarnation: int) -> Region | None:
        """The writer's region while its process is the one that holds the lease; None when another took its name."""
        state = self._host.peers.states.get(worker)
        return state.region if state is not None and state.incarnation == incarnation else None

    def _give_back(self, reservation: Reservation, blocks: list[int]) -> None:
        """The lease ended without a sequence: its fresh blocks and the references on the cached ones are returned."""
        if self._reservations.pop(reservation.lease.lease_id, None) is not None:
            self._host.pool.release(reservation.cached + blocks)
            self._host.jobs.room_changed()
            self._host.device.wake()
