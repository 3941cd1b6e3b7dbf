"""Leases on blocks for one prompt each, from the grant until no write can land.

The rules are the sans-IO `kvtransfer.lease.LeaseTable`: blocks under a lease belong to the *transfer* until it ended;
after an abort they stay in quarantine until no write can land. This file adds the memory and the questions to writers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from common.blocks import pack_tokens
from common.errors import UnavailableError
from common.messages import (
    Ack,
    Cancel,
    Handoff,
    Job,
    LeaseAborted,
    Region,
    Resend,
    Reserve,
    ReserveReply,
    WriterDone,
)
from engine.groups import Entry
from engine.sequence import Sequence
from kvtransfer.lease import Lease, LeaseState, LeaseTable
from kvtransfer.plan import Cargo, Item
from worker.context import RoleContext
from worker.serving.allocation import received
from worker.serving.jobs import Tombstones
from worker.unnamed import OLD_WRITERS

log = logging.getLogger("baton.intake")

LEASE_S = 30.0  # a lease expires after this unless its writer renews it
ASK_WRITER_S = 2.0  # how often a writer is asked if it still knows its lease
ANSWER_TIMEOUT_S = 1.0
NO_TOKENS = 2**31  # above any stream's position: a `Resend` from here sends nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A prompt's blocks in this worker's pool: cached entries first (verified before), then `fresh` blocks.

    The writer fills the first of the fresh ones, in the order of `lacking`. The others are for the next token, where it begins
    a block.
    """

    entries: list[list[Entry]]  # cached, by group; the reservation holds references on them
    digests: list[bytes]  # one for each of the first group's
    fresh: list[int]
    cargo: Cargo
    lacking: list[Item]  # what is pushed

    @property
    def num_pushed(self) -> int:
        return len(self.lacking)

    @property
    def num_cached(self) -> int:
        """Cached blocks of tokens."""
        return len(self.entries[0])

    @property
    def firsts(self) -> list[int]:
        """The first entry that is pushed, by group."""
        return [group.first + len(found) for group, found in zip(self.cargo.groups, self.entries, strict=True)]

    @property
    def found(self) -> list[int]:
        """All blocks that were cached."""
        return [*chain(*chain(*self.entries))]


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """The job behind a lease, and its prompt's blocks in order."""

    lease: Lease
    job: Job
    sequence: Sequence  # has no blocks until the lease is accepted
    room: Room
    deadline_at: float
    granted_at: float
    ask_at: float  # when to ask the writer about the lease
    reply: ReserveReply
    writer_region: Region | None  # fences a lost writer, which the live table forgets


class Reservations:
    """All reservations of one decode worker under which writes may still land."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._table = LeaseTable(incarnation=context.identity.incarnation)
        self._by_lease: dict[int, Reservation] = {}  # until the lease ended
        self._given_up = Tombstones()  # by writer and request

    def __len__(self) -> int:
        return len(self._by_lease)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(list(self._by_lease.values()))

    @property
    def num_open(self) -> int:
        """Reservations that may still become sequences."""
        return sum(one.lease.state in (LeaseState.RESERVED, LeaseState.VERIFYING) for one in self)

    @property
    def held_blocks(self) -> int:
        return self._table.held_blocks

    # -- from the grant to the verdict -------------------------------------------------------------------------------

    def granted(self, message: Reserve) -> Reservation | None:
        """An earlier grant to this writer for this attempt."""
        asked = (message.job.request_id, message.job.attempt, message.worker, message.incarnation)
        for one in self:
            lease = one.lease
            its = (lease.request_id, lease.attempt, lease.writer, lease.writer_incarnation)
            if its == asked and lease.state is LeaseState.RESERVED:
                return one
        return None

    def grant(self, message: Reserve, sequence: Sequence, room: Room) -> ReserveReply:
        """Open a lease on the room. Raises HandoffRefusedError, and the room stays the caller's."""
        job, now, context = message.job, time.monotonic(), self._context
        lease_s = min(LEASE_S, message.remaining_ms / 1000)
        lease = self._table.reserve(
            now,
            request_id=job.request_id,
            attempt=job.attempt,
            writer=message.worker,
            writer_incarnation=message.incarnation,
            blocks=room.fresh,
            expires_at=now + lease_s,
        )
        pushed = room.fresh[: room.num_pushed]
        context.transfers.transport.expect(lease.lease_id, lease.generation, pushed)
        reply = ReserveReply(
            granted=True,
            incarnation=context.identity.incarnation,
            lease_id=lease.lease_id,
            generation=lease.generation,
            first_block=room.num_cached,
            first_entries=room.firsts[1:],
            destination_blocks=pack_tokens(pushed),
            lease_ms=int(lease_s * 1000),
            region=context.transfers.region,
        )
        self._by_lease[lease.lease_id] = Reservation(
            lease=lease,
            job=job,
            sequence=sequence,
            room=room,
            deadline_at=now + message.remaining_ms / 1000,
            granted_at=now,
            ask_at=now + ASK_WRITER_S,
            reply=reply,
            writer_region=self.writer_region(message.worker, message.incarnation),
        )
        return reply

    def begin_verify(self, message: Handoff) -> Reservation:
        """Begin to check a lease whose writer finished. Raises HandoffRefusedError."""
        self._table.begin_verify(
            time.monotonic(),
            lease_id=message.lease_id,
            generation=message.generation,
            request_id=message.request_id,
            attempt=message.attempt,
            writer=message.worker,
            writer_incarnation=message.incarnation,
        )
        return self._by_lease[message.lease_id]

    def accept(self, reservation: Reservation) -> None:
        """End the lease: its blocks are the sequence's."""
        blocks, room, sequence = self._table.accept(reservation.lease.lease_id), reservation.room, reservation.sequence
        del self._by_lease[reservation.lease.lease_id]
        placed = room.cargo.place(room.lacking, blocks[: room.num_pushed])
        entries = [[*found, *pushed] for found, pushed in zip(room.entries, placed, strict=True)]
        pool, next_ones = self._context.cache.pool, iter(blocks[room.num_pushed :])
        if len(blocks) > room.num_pushed:
            for group, own in zip(pool.groups, entries, strict=True):
                own += [tuple(islice(next_ones, group.blocks))] if group.grows else []
        sequence.tables = received(pool, room.cargo, entries, [*map(len, room.entries)])

    def reject(self, reservation: Reservation) -> None:
        """End a rejected lease and return its blocks: its writer writes no more."""
        self._give_back(reservation, self._table.reject(reservation.lease.lease_id))

    # -- abort, quarantine, release ----------------------------------------------------------------------------------

    def writer_done(self, message: WriterDone) -> Ack:
        """End a lease that the writer gave up: free its blocks at once."""
        freed = self._table.writer_done(
            lease_id=message.lease_id, generation=message.generation, writer_incarnation=message.incarnation
        )
        reservation = self._by_lease.get(message.lease_id)
        if reservation is None or reservation.lease.state is not LeaseState.RELEASED:
            return Ack(known=False)
        self._context.transfers.transport.forget(message.lease_id, message.generation)
        self._give_back(reservation, freed)
        return Ack(known=True)

    def gave_up(self, message: Reserve) -> bool:
        """True if this writer cancelled its question for the attempt."""
        return self._given_up.covers(f"{self._writer(message.worker)} {message.job.request_id}", message.job.attempt)

    async def give_up(self, message: Cancel) -> bool:
        """Cancel a writer's questions for a request; abort its own lease only."""
        self._given_up.add(f"{message.worker} {message.request_id}", message.attempt)
        for reservation in self:
            lease = reservation.lease
            is_its = lease.request_id == message.request_id and self._writer(lease.writer) == message.worker
            if is_its and lease.attempt <= message.attempt and self._table.give_up(lease.lease_id):
                await self._abort(lease, "its writer gave it up")
                return True
        return False

    def _writer(self, worker: str) -> str:
        return OLD_WRITERS if self._context.messenger.peers.speaks_unnamed(worker) else worker

    async def cancel(self, request_id: str, attempt: int) -> bool:
        """Abort the request's lease; its blocks stay in quarantine until no write can land.

        A request without a lease leaves no tombstone here: anybody can name it, and `Cancelled` knows whose word it was.
        """
        if not any(one.job.request_id == request_id for one in self):
            return False
        lease = self._table.cancel(time.monotonic(), request_id, attempt)
        if lease is None:
            return False
        await self._abort(lease, "cancelled")
        return True

    async def cancel_all(self, *, gateway: str | None) -> None:
        """Abort every lease, or those for one gateway's requests."""
        for reservation in self:
            if gateway is None or reservation.job.gateway == gateway:
                await self.cancel(reservation.job.request_id, reservation.job.attempt)

    async def look_after(self, now: float) -> None:
        """Expire leases, and ask writers of quarantined ones to stop until they reply or are gone.

        Writers of open leases are asked too. One may have given up before its question was taken, or its `WriterDone` was lost.
        One that still computes the prompt keeps its lease, up to the request's deadline.
        """
        self._table.expire(now)
        for reservation in self:
            state = reservation.lease.state
            if state is LeaseState.QUARANTINED:
                await self._abort(reservation.lease, "expired or cancelled")
            elif state is LeaseState.RESERVED and now >= reservation.ask_at:
                reservation.ask_at = now + ASK_WRITER_S
                self._context.background.spawn(self._ask_writer(reservation))

    def worker_lost(self, worker: str, incarnation: int) -> None:
        """Free a lost writer's blocks once its writes can't land: a silent writer may still be writing."""
        for reservation in self:
            lease = reservation.lease
            if (lease.writer, lease.writer_incarnation) == (worker, incarnation):
                self._release_if_writer_gone(reservation)

    def writer_region(self, worker: str, incarnation: int) -> Region | None:
        """The writer's region, if its process is the one that asks; None once another process took its name."""
        state = self._context.messenger.peers.states.get(worker)
        return state.region if state is not None and state.incarnation == incarnation else None

    async def _ask_writer(self, reservation: Reservation) -> None:
        lease = reservation.lease
        question = Resend(
            request_id=lease.request_id,
            attempt=lease.attempt,
            traceparent=reservation.job.context,
            position=NO_TOKENS,
            worker=self._context.identity.worker,
        )
        try:
            reply = await self._context.messenger.ask(lease.writer, question, timeout_s=ANSWER_TIMEOUT_S)
        except UnavailableError:
            return  # `worker_lost` handles a writer that is gone
        if not isinstance(reply, Ack):
            return
        if reply.known:
            self._table.renew(lease.lease_id, min(time.monotonic() + LEASE_S, reservation.deadline_at))
        elif self._table.give_up(lease.lease_id):
            await self._abort(lease, "its writer does not know of it")

    async def _abort(self, lease: Lease, reason: str) -> None:
        self._context.transfers.transport.forget(lease.lease_id, lease.generation)
        reservation = self._by_lease.get(lease.lease_id)
        if reservation is None or self._release_if_writer_gone(reservation):
            return
        message = LeaseAborted(
            **self._context.identity.head(reservation.job),
            lease_id=lease.lease_id,
            generation=lease.generation,
            reason=reason,
        )
        try:
            await self._context.messenger.tell(lease.writer, message)
        except UnavailableError:
            log.debug("intake.abort_not_told", extra={"writer": lease.writer})

    def _release_if_writer_gone(self, reservation: Reservation) -> bool:
        """End this lease only if no write can land under it once it is forgotten, by all ranks of this worker."""
        lease, transfers = reservation.lease, self._context.transfers
        if lease.state is LeaseState.VERIFYING or not transfers.writer_gone(reservation.writer_region):
            return False
        transfers.transport.forget(lease.lease_id, lease.generation)
        if not transfers.writer_gone(reservation.writer_region):
            return False
        freed = self._table.writer_done(
            lease_id=lease.lease_id, generation=lease.generation, writer_incarnation=lease.writer_incarnation
        )
        self._give_back(reservation, freed)
        return True

    def _give_back(self, reservation: Reservation, blocks: list[int]) -> None:
        """Return fresh blocks, and the references on cached ones, of a lease that got no sequence."""
        if self._by_lease.pop(reservation.lease.lease_id, None) is not None:
            self._context.cache.pool.release(reservation.room.found + blocks)
            self._context.jobs.room_changed()
            self._context.passes.wake()
