"""The receiving side of handoffs: grant a lease, verify the manifest, add the sequence to the batch.

This file decides who gets a lease and checks what arrived; `decode.reservations` keeps the leases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import chain

import msgspec
from msgspec import UnsetType

from common.blocks import hash_blocks
from common.errors import HandoffRefusedError, InvalidRequestError, UnavailableError
from common.messages import (
    Cancel,
    Handoff,
    HandoffReply,
    Imported,
    Job,
    KVLayout,
    Reserve,
    ReserveAgain,
    ReserveReply,
)
from common.words import MOST_DRAFTED, Refusal, Role
from decode.loads import HandoffLoads
from decode.questions import ASKED_AGAIN_S, Questions
from decode.request import DecodeRequest, record_verification
from decode.reservations import Reservation, Reservations, Room
from engine.cache.block_pool import OutOfBlocksError
from engine.sequence import Sequence
from kvtransfer.digest import pool_digests
from kvtransfer.plan import Cargo, differences
from kvtransfer.transport import TransferError, all_expect
from worker.context import RoleContext
from worker.serving.allocation import blocks_for, cargo_of, publish_computed, sequence_of
from worker.serving.checks import check_job
from worker.serving.jobs import Cancelled, Tombstones

log = logging.getLogger("baton.intake")

ARRIVAL_WAIT_S = 5.0  # the manifest may overtake the last blocks
MAX_VERDICTS = 1_000  # replies kept for repeated manifests
_MOST_DETAIL = 500  # characters


class Intake:
    """Answers `Reserve` and `Handoff` for the decode role."""

    def __init__(
        self,
        context: RoleContext,
        *,
        placed: Callable[[], int],
        running: Callable[[], int],
        cancelled: Cancelled,
        activate: Callable[[DecodeRequest], None],
    ) -> None:
        """`placed()`: requests with a batch slot, or waiting for blocks with one; `running()`: those with blocks."""
        self._context = context
        self._placed = placed
        self._running = running
        self._cancelled = cancelled
        self._activate = activate
        self._verdicts: OrderedDict[tuple[int | str, ...], asyncio.Task[HandoffReply]] = OrderedDict()
        self._accepted = Tombstones()
        self._questions = Questions()
        self._loads = None if context.cache.tier is None else HandoffLoads(context.cache.tier)
        self.reservations = Reservations(context)
        self.bad_digests = 0

    # -- reserve -----------------------------------------------------------------------------------------------------

    async def reserve(self, message: Reserve | ReserveAgain) -> ReserveReply:
        """Grant a lease for the whole prompt and the first generated token, or refuse. Idempotent."""
        asked = self._questions.find(message) if isinstance(message, ReserveAgain) else message
        if asked is None:
            return ReserveReply(granted=False, reason=Refusal.UNKNOWN_JOB)
        if self._loads is not None:
            asked = await self._loaded(asked, self._loads)
        reply = self._answer(asked)
        await all_expect(self._context.transfers.transport)
        if not reply.granted and not reply.reason.is_final:
            self._questions.keep(asked, time.monotonic())
        return reply

    async def _loaded(self, message: Reserve, loads: HandoffLoads) -> Reserve:
        """The question as it stands once what tiers have of its prompt is in the pool."""
        began, question = time.monotonic(), _question(message, message.job)
        if self._refusal(message)[0] or self.reservations.granted(message) is not None:
            return message
        pool, sequence = self._context.cache.pool, sequence_of(message.job)
        cargo, writer = (
            cargo_of(pool, len(sequence.token_ids)),
            self._context.messenger.peers.states.get(message.worker),
        )

        def has_room() -> bool:
            return pool.num_free - self._context.cache.turns.kept_from(question) >= self._most_wanted(cargo, question)

        link = 0.0 if writer is None else writer.link_bytes_per_s
        await loads.bring(sequence, link_bytes_per_s=link, has_room=has_room)
        waited_ms = int((time.monotonic() - began) * 1000)
        return msgspec.structs.replace(message, remaining_ms=max(1, message.remaining_ms - waited_ms))

    def _answer(self, message: Reserve) -> ReserveReply:
        turns, question = self._context.cache.turns, _question(message, message.job)
        turns.still_waits(question, until=time.monotonic() + ASKED_AGAIN_S)
        refusal, detail = self._refusal(message)
        if refusal:
            if refusal is not Refusal.FULL:
                turns.leaves(question)
            return ReserveReply(granted=False, reason=refusal, detail=detail)
        known = self.reservations.granted(message)
        if known is not None:
            return known.reply
        sequence = sequence_of(message.job)
        self._context.model.grammars.prepare(sequence)  # while the prompt is computed elsewhere
        try:
            room = self._room_for(sequence, question)
        except OutOfBlocksError:
            return ReserveReply(granted=False, reason=Refusal.FULL)
        try:
            reply = self.reservations.grant(message, sequence, room)
        except HandoffRefusedError as error:
            self._context.cache.pool.release(room.found + room.fresh)
            return ReserveReply(granted=False, reason=error.refusal)
        turns.admitted(question)
        return reply

    async def give_up(self, message: Cancel) -> bool:
        """Cancel a writer's questions for a request; return True if it had a lease."""
        self._context.cache.turns.leaves(_question(message, message))
        self._questions.taken_back(message)
        return await self.reservations.give_up(message)

    async def look_after(self, now: float) -> None:
        """Forget writers that ask no more, and look after the leases."""
        self._questions.look_after(now)
        await self.reservations.look_after(now)

    def _refusal(self, message: Reserve) -> tuple[Refusal, str]:
        """Return why the request gets no lease, with details for people."""
        job = message.job
        if not self._context.roles.takes(Role.DECODE):
            return Refusal.DRAINING, ""
        if not self._context.cache.layout.same_model(message.layout):
            return Refusal.INCOMPATIBLE, _unlike(message.layout, self._context.cache.layout)
        if self._context.transfers.region.ranks and not message.num_ranks:
            return Refusal.INCOMPATIBLE, "its release writes to workers of one rank alone"
        if self._cancelled.covers(job) or self.reservations.gave_up(message):
            return Refusal.CANCELLED, ""
        if self._accepted.covers(job.request_id, job.attempt):
            return Refusal.HANDED_OVER, ""  # a late repetition; nobody would end a new lease
        if self.reservations.writer_region(message.worker, message.incarnation) is None:
            return Refusal.UNKNOWN_WRITER, ""  # without its region, its death would go unnoticed
        try:
            check_job(job, vocab_size=self._context.model.vocab_size, max_model_len=self._context.model.max_model_len)
        except InvalidRequestError as error:
            return Refusal.INVALID, error.message
        is_new = self.reservations.granted(message) is None
        num_before = self._num_before(_question(message, job))
        if is_new and num_before + self.reservations.num_open >= self._context.model.max_sequences:
            return Refusal.FULL, ""
        return Refusal.NONE, ""

    def _num_before(self, question: Hashable) -> int:
        """Number of sequences whose slot and blocks are left free. A request that is due does not wait for those behind it."""
        return self._running() if question in self._context.cache.turns.due else self._placed()

    def _room_for(self, sequence: Sequence, question: Hashable) -> Room:
        """Take blocks for what the prompt's next token reads, and for that token.

        Raises OutOfBlocksError and takes nothing; the question waits then.
        """
        pool, num_tokens = self._context.cache.pool, len(sequence.token_ids)
        cargo = cargo_of(pool, num_tokens)
        digests = hash_blocks(sequence.hash_root, sequence.token_ids, pool.block_size)
        # Nothing found is changed in place: the sequence goes on in entries of its own.
        found = [
            pool.match_entries(number, digests[part.first :] if group.grows else [])
            for number, (group, part) in enumerate(zip(pool.groups, cargo.groups, strict=True))
        ]
        firsts = [part.first + len(entries) for part, entries in zip(cargo.groups, found, strict=True)]
        lacking = cargo.lacking(firsts)
        num_next, room_to_grow = self._num_next(cargo), self._room_to_grow(question)
        kept = self._context.cache.turns.kept_from(question)
        try:
            fresh = pool.allocate(len(lacking) + num_next, spare=room_to_grow + kept)
        except OutOfBlocksError:
            pool.release([*chain(*chain(*found))])
            blocks = self._most_wanted(cargo, question)
            self._context.cache.turns.waits(question, blocks=blocks, until=time.monotonic() + ASKED_AGAIN_S)
            raise
        return Room(entries=found, digests=digests[: len(found[0])], fresh=fresh, cargo=cargo, lacking=lacking)

    def _most_wanted(self, cargo: Cargo, question: Hashable) -> int:
        """Blocks that a prompt needs where nothing of it is found, and those that others leave free for their growth."""
        nothing = [0] * len(cargo.groups)
        return len(cargo.lacking(nothing)) + self._num_next(cargo) + self._room_to_grow(question)

    def _num_next(self, cargo: Cargo) -> int:
        """Blocks for the next token."""
        pool = self._context.cache.pool
        return (blocks_for(cargo.num_tokens + 1, pool.block_size) - cargo.num_blocks) * pool.growth

    def _room_to_grow(self, question: Hashable) -> int:
        """One spare block a running sequence."""
        return self._num_before(question) * self._context.cache.pool.growth

    # -- manifest ----------------------------------------------------------------------------------------------------

    async def hand_over(self, message: Handoff) -> HandoffReply:
        """Verify and activate once: a repeated manifest gets the first answer."""
        # The key names the sender's process, so that only this writer's manifest decides about its lease.
        key = (
            message.lease_id, message.generation, message.request_id, message.attempt,
            message.worker, message.incarnation, message.decode_incarnation,
        )  # fmt: skip
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._context.background.spawn(self._verify_recorded(message))
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return await asyncio.shield(verdict)

    async def _verify_recorded(self, message: Handoff) -> HandoffReply:
        began_at = time.monotonic()
        refusal = await self._verify(message)
        self._context.totals.refused_handoffs += bool(refusal)
        record_verification(
            self._context.tracer, message, worker=self._context.identity.worker, began_at=began_at, refusal=refusal
        )
        return HandoffReply(accepted=not refusal, reason=refusal)

    async def _verify(self, message: Handoff) -> Refusal:
        """Accept the manifest and return NONE, or the reason against it."""
        if message.decode_incarnation != self._context.identity.incarnation:
            return Refusal.STALE
        try:
            reservation = self.reservations.begin_verify(message)
        except HandoffRefusedError as error:
            return error.refusal
        refusal = await self._check(reservation, message)
        self._context.transfers.transport.forget(message.lease_id, message.generation)
        if reservation.lease.cancelled or self._cancelled.covers(reservation.job):
            refusal = Refusal.CANCELLED
        if refusal:
            self.reservations.reject(reservation)
        else:
            self._accept(reservation, message)
        return refusal

    async def _check(self, reservation: Reservation, message: Handoff) -> Refusal:
        """Find the fault, if any: every pushed block must have arrived with its writer's digest."""
        wait_s = max(0.0, min(ARRIVAL_WAIT_S, message.remaining_ms / 1000))
        if not await self._context.transfers.transport.arrived(message.lease_id, message.generation, wait_s):
            return Refusal.INCOMPLETE
        pushed = reservation.lease.blocks[: reservation.room.num_pushed]
        if len(message.digests) != 8 * len(pushed):
            return Refusal.INCOMPLETE
        cache, transport = self._context.cache, self._context.transfers.transport
        try:
            digests = await pool_digests(transport, cache.kv, cache.layout, pushed)
        except TransferError:  # one of our ranks is gone
            return Refusal.INCOMPLETE
        if digests != message.digests:
            self.bad_digests += 1
            log.error("intake.bad_digest", extra={"request_id": message.request_id, "writer": message.worker})
            return Refusal.DIGEST
        if not 0 <= message.first_token < self._context.model.vocab_size:
            return Refusal.INVALID
        await self._context.model.built(reservation.sequence)
        return Refusal.NONE

    def _accept(self, reservation: Reservation, message: Handoff) -> None:
        job, sequence, room = reservation.job, reservation.sequence, reservation.room
        self.reservations.accept(reservation)
        self._context.totals.kept_bytes += len(room.found) * self._context.transfers.block_bytes
        self._accepted.add(message.request_id, message.attempt)
        sequence.digests = list(room.digests)
        sequence.num_cached = room.num_cached * self._context.cache.pool.block_size
        sequence.restart(len(sequence.token_ids))
        publish_computed(self._context.cache.pool, sequence)
        sequence.append(message.first_token)
        if all(0 <= token < self._context.model.vocab_size for token in message.drafts):
            sequence.propose(message.drafts[:MOST_DRAFTED])
        # The prompt's logprobs exist on the prefill worker alone, and go out with the first token, which is never sent from here.
        sampling = sequence.sampling
        knows_first = sampling.prompt_logprobs is None
        knows_first = knows_first and (sampling.logprobs is None or message.first_logprobs is not None)
        request = DecodeRequest(
            job=job,
            sequence=sequence,
            deadline_at=reservation.deadline_at,
            first_position=sequence.num_generated - knows_first,
            logprobs=[message.first_logprobs] if knows_first and message.first_logprobs is not None else [],
            cached_tokens=min(message.num_cached_tokens, job.num_prompt_tokens),
        )
        self._activate(request)
        self._context.background.spawn(self._tell_imported(reservation, message.traceparent or job.context))

    async def _tell_imported(self, reservation: Reservation, trace: str | UnsetType) -> None:
        imported = Imported(
            **self._context.identity.head(reservation.job, trace=trace),
            transferred_blocks=reservation.room.num_pushed,
            transferred_bytes=reservation.room.num_pushed * self._context.transfers.block_bytes,
            reused_blocks=reservation.room.num_cached,
            transfer_ms=(time.monotonic() - reservation.granted_at) * 1000,
        )
        try:
            await self._context.messenger.tell_gateway(reservation.job.gateway, imported)
        except UnavailableError:
            log.warning("intake.import_not_told", extra={"request_id": reservation.job.request_id})


def _question(asked: Reserve | Cancel, attempt: Job | Cancel) -> Hashable:
    """Key of a writer's question for room for one attempt."""
    return asked.worker, attempt.request_id, attempt.attempt


def _unlike(theirs: KVLayout, ours: KVLayout) -> str:
    """Return how a prefill worker's layout differs, from its point of view."""
    try:
        reasons = differences(theirs, ours) or ["other heads"]
    except ValueError as error:  # an unknown dtype
        reasons = [str(error)]
    return ("its KV layout differs: " + "; ".join(reasons))[:_MOST_DETAIL]
