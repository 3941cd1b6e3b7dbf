"""The receiving end of pulls: a prompt whose prefix a peer has waits until that peer pushed it, or computes it itself.

    RESERVED ──the peer answers: all is written, or nothing──▶ RELEASED
       └──late, or the peer is lost──▶ QUARANTINED ──no write can land──▶ RELEASED

What was pushed is published if its digests fit: admission finds it like all that is cached. Else it is a miss.
The rules are those of handoffs (`kvtransfer.lease`): blocks belong to the transfer until no write can land in them, and bytes
are used once their digests fit. A pull is bounded in number, blocks and time; passes go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import msgspec
import torch

from common.blocks import pack_tokens
from common.errors import NobodyListensError, UnavailableError
from common.messages import (
    Ack,
    Feature,
    Job,
    KVLayout,
    PullBlocks,
    PullReply,
    PullTotals,
    Region,
    StopPull,
    WorkerState,
)
from common.policy import placement_policy
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.cache.changes import Chain
from engine.groups import resumable
from engine.sequence import Sequence
from kvtransfer.digest import pool_digests
from kvtransfer.lease import Lease, LeaseTable
from kvtransfer.transport import TransferError, Transfers, all_expect
from worker.device.costs import PromptCost, PullCost, pairs_of
from worker.identity import Messenger
from worker.serving.allocation import cargo_of, digests_of

log = logging.getLogger("baton.pulls")

FIRST_LEASE = 1 << 32  # a worker's leases of handoffs have smaller numbers
MOST_PULLS = 4  # at a time, those in quarantine included
MOST_OF_POOL = 0.5  # blocks under leases of pulls
# A pull has this time, and the time that its bytes take at this rate.
LEAST_S, LEAST_BYTES_PER_S = 1.0, 256e6
AVOIDED_S = 10.0  # after a peer failed to push in time
STOP_TIMEOUT_S = 1.0
ASK_AGAIN_S = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class Pulling:
    """A prefix on its way from a peer, with references on all of its blocks until no write can land."""

    lease: Lease
    job: Job
    sequence: Sequence
    digests: list[bytes]  # what the peer is said to have
    usable: int  # its first blocks with which a sequence could go on before
    held: list[int]  # its first blocks of tokens, which are here
    region: Region  # the peer's: it shows when that can't write any more
    began_at: float
    asking: asyncio.Task[Any] | None = None
    is_over: bool = False  # no prompt waits for it


class Puller:
    """Begins a pull at most once for a prompt, and only when all of the prompt could be admitted."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        layout: KVLayout,
        kv: torch.Tensor,
        messenger: Messenger,
        transfers: Transfers,
        cost: PromptCost,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        wake: Callable[[], object],
    ) -> None:
        """`cost`: what computing takes; `wake()` is called when a prompt may be admitted."""
        self._pool, self._layout, self._kv = pool, layout, kv
        self._messenger, self._transfers = messenger, transfers
        self._cost, self._spawn, self._wake = cost, spawn, wake
        self._policy = placement_policy()["pull"]
        self.table = LeaseTable(incarnation=messenger.identity.incarnation, first_id=FIRST_LEASE)
        self.prompts: dict[Sequence, Job | Pulling] = {}  # a peer has more of each
        self._numbers = count()
        self._open: list[Pulling] = []  # those under whose leases writes may land
        self._avoided: dict[tuple[str, int], float] = {}  # peers and their incarnations, until when
        self.totals = PullTotals()
        self.rate = PullCost(self._policy["fixed_ms"] / 1000)
        self._linked: set[tuple[str, int]] = set()  # peers that pushed before: their first push opened a link

    def offered(self, sequence: Sequence, job: Job) -> None:
        """Note the peer that has more of a prompt: its job names it."""
        if job.holder != self._messenger.identity.worker and not sequence.scores_prompt:
            self.prompts[sequence] = job

    def is_loading(self, sequence: Sequence, *, has_room: Callable[[], bool]) -> bool:
        """True while a prompt's prefix is pulled, which begins once `has_room()` if that is quicker than computing it."""
        known = self.prompts.get(sequence)
        if isinstance(known, Job) and has_room():
            known = self._begin(sequence, known)
            if known is None:
                del self.prompts[sequence]
            else:
                self.prompts[sequence] = known
        return isinstance(known, Pulling) and not known.is_over

    def loads(self, sequence: Sequence) -> bool:
        """True while a prompt's prefix is pulled."""
        known = self.prompts.get(sequence)
        return isinstance(known, Pulling) and not known.is_over

    def left(self, sequence: Sequence) -> None:
        """Forget a prompt that was admitted, or is wanted no more; what still comes becomes cached."""
        self.prompts.pop(sequence, None)

    def worker_lost(self, worker: str, incarnation: int) -> None:
        """Let prompts compute what a lost peer was to push; its blocks stay in quarantine until it can't write."""
        self._avoided.pop((worker, incarnation), None)
        self._linked.discard((worker, incarnation))
        for pull in self._open:
            if (pull.lease.writer, pull.lease.writer_incarnation) == (worker, incarnation) and pull.asking is not None:
                pull.asking.cancel()

    # -- the question --------------------------------------------------------------------------------------------------

    def _begin(self, sequence: Sequence, job: Job) -> Pulling | None:
        pool, peer, now = self._pool, self._messenger.peers.states.get(job.holder), time.monotonic()
        if peer is None or not self._may_lend(peer, now):
            return None
        digests = digests_of(pool, sequence)[: max(0, job.holder_blocks)]
        first = pool.count_prefix(digests)
        for other in self._open:  # a twin's pull brings this prompt's blocks, too
            if not other.is_over and first < len(digests) and digests[first] in other.digests:
                return other
        usable = resumable(
            pool.groups[1:], pool.block_size, first, lambda number, at: pool.has(number + 1, digests[at])
        )
        cargo = cargo_of(pool, len(digests) * pool.block_size)
        num_blocks = len(cargo.lacking([first, *[0] * (len(pool.groups) - 1)])) if first < len(digests) else 0
        room = MOST_OF_POOL * pool.num_blocks - self.table.held_blocks
        if not 0 < num_blocks <= room or len(self._open) >= MOST_PULLS:
            return None
        if not self._pays(usable, len(digests), num_blocks):
            return None
        held = [*chain(*(pool.hold(0, digest) for digest in digests[:first]))]
        try:
            fresh = pool.allocate(num_blocks)
        except OutOfBlocksError:
            pool.release(held)
            return None
        pool.changes.learn(Chain(sequence.hash_root, digests, sequence.token_ids, pool.block_size))
        pull = Pulling(
            lease=self._reserved(job, peer, fresh, now),
            job=job,
            sequence=sequence,
            digests=digests,
            usable=usable,
            held=held,
            region=peer.region,
            began_at=now,
        )
        self._transfers.transport.expect(pull.lease.lease_id, pull.lease.generation, fresh)
        self._open.append(pull)
        self._spawn(self._follow(pull))
        return pull

    def _may_lend(self, peer: WorkerState, now: float) -> bool:
        is_alike = peer.region.transport == self._transfers.region.transport
        is_alike = is_alike and self._layout.same_model(peer.region.layout)
        return (
            is_alike
            and Feature.PULLS in peer.can
            and now >= self._avoided.get((peer.worker, peer.incarnation), -math.inf)
        )

    def _pays(self, usable: int, promised: int, num_blocks: int) -> bool:
        """True if pulling so many blocks takes no longer than computing their tokens; before passes were measured, too."""
        begin, end = usable * self._pool.block_size, promised * self._pool.block_size
        computing_s = self._cost.seconds(end - begin, pairs_of(begin, end))
        links = (state.link_bytes_per_s for state in self._messenger.peers.states.values())
        pulling_s = self.rate.seconds(num_blocks * self._transfers.block_bytes, links, time.monotonic())
        return end - begin >= self._policy["least_tokens"] and (not computing_s or pulling_s < computing_s)

    def _reserved(self, job: Job, peer: WorkerState, blocks: list[int], now: float) -> Lease:
        """A lease that no other's question can end: the pull bounds its time."""
        return self.table.reserve(
            now,
            request_id=f"{job.request_id}:{next(self._numbers)}",
            attempt=job.attempt,
            writer=peer.worker,
            writer_incarnation=peer.incarnation,
            blocks=blocks,
            expires_at=math.inf,
        )

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def _follow(self, pull: Pulling) -> None:
        """Ask the peer, use what it pushed, and end the lease once no write can land."""
        lease = pull.lease
        pull.asking = asyncio.create_task(self._ask(pull))
        await asyncio.wait([pull.asking])
        reply = None if pull.asking.cancelled() else pull.asking.result()
        if reply is None:
            log.warning("pulls.given_up", extra={"worker": lease.writer, "blocks": len(lease.blocks)})
            self._avoided[lease.writer, lease.writer_incarnation] = time.monotonic() + AVOIDED_S
            self._count(failed=1)
            self.table.give_up(lease.lease_id)
            self._is_over(pull)
            await self._outwait(pull)
            self._release(pull)
            return
        try:
            if reply.count:
                await self._take(pull, reply)
            else:
                self._count(missed=1)
        finally:
            self._release(pull)

    async def _ask(self, pull: Pulling) -> PullReply | None:
        """The peer's answer, after which it writes no more; None without one in time."""
        lease = pull.lease
        await all_expect(self._transfers.transport)
        time_s = LEAST_S + len(lease.blocks) * self._transfers.block_bytes / LEAST_BYTES_PER_S
        message = PullBlocks(
            **self._messenger.identity.head(pull.job),
            lender_incarnation=lease.writer_incarnation,
            lease_id=lease.lease_id,
            generation=lease.generation,
            digests=b"".join(pull.digests),
            first_block=len(pull.held),
            destination_blocks=pack_tokens(lease.blocks),
            region=self._transfers.region,
            remaining_ms=int(1000 * time_s),
        )
        try:
            reply = await self._messenger.ask(lease.writer, message, timeout_s=time_s)
        except NobodyListensError:
            return PullReply()  # it was delivered to nobody
        except UnavailableError:
            return None
        except Exception:
            log.exception("pulls.not_asked")
            return None
        return reply if isinstance(reply, PullReply) else None

    async def _outwait(self, pull: Pulling) -> None:
        """Return once no write can land: the peer says that it stopped, or is gone."""
        lease, transport = pull.lease, self._transfers.transport
        transport.forget(lease.lease_id, lease.generation)
        stop = StopPull(
            **self._messenger.identity.head(pull.job),
            lender_incarnation=lease.writer_incarnation,
            lease_id=lease.lease_id,
            generation=lease.generation,
        )
        while not self._transfers.writer_gone(pull.region):
            try:
                reply = await self._messenger.ask(lease.writer, stop, timeout_s=STOP_TIMEOUT_S)
                if isinstance(reply, Ack) and reply.known:
                    return
            except UnavailableError:
                log.debug("pulls.no_answer", extra={"worker": lease.writer})
            await asyncio.sleep(ASK_AGAIN_S)

    async def _take(self, pull: Pulling, reply: PullReply) -> None:
        """Publish what the peer pushed, all of it or nothing: each byte must be the one that it sent."""
        pool, lease, first = self._pool, pull.lease, len(pull.held)
        firsts = [first, *[0] * (len(pool.groups) - 1)]
        cargo = cargo_of(pool, reply.count * pool.block_size)
        items = cargo.lacking(firsts) if first < reply.count <= len(pull.digests) else []
        blocks = lease.blocks[: len(items)]
        found = b""
        if blocks and len(blocks) == len(items) and len(reply.digests) == 8 * len(items):
            with contextlib.suppress(TransferError):  # one of our ranks is gone
                found = await pool_digests(self._transfers.transport, self._kv, self._layout, blocks)
        if not found or found != reply.digests:
            log.error("pulls.bad_digest", extra={"worker": lease.writer})
            self._count(bad_digests=1)
            return
        begins = [max(begin, part.first) for begin, part in zip(firsts, cargo.groups, strict=True)]
        for number, (begin, entries) in enumerate(zip(begins, cargo.place(items, blocks), strict=True)):
            for at, entry in enumerate(entries, begin):
                pool.publish_entry(number, entry, pull.digests, at + 1)
        pool.count_as_hit(pull.held + blocks)
        num_bytes = len(blocks) * self._transfers.block_bytes
        peer, now = (lease.writer, lease.writer_incarnation), time.monotonic()
        if peer in self._linked:
            self.rate.add(num_bytes, max(0.0, now - pull.began_at - max(0, reply.loading_ms) / 1000), now)
        self._linked.add(peer)
        tokens = max(0, reply.count - pull.usable) * pool.block_size
        self._count(pulls=1, tokens=tokens, blocks=len(blocks), bytes=num_bytes)

    def _release(self, pull: Pulling) -> None:
        """End the lease, under which no write can land any more."""
        lease = pull.lease
        self._transfers.transport.forget(lease.lease_id, lease.generation)
        blocks = self.table.writer_done(
            lease_id=lease.lease_id, generation=lease.generation, writer_incarnation=lease.writer_incarnation
        )
        self._open.remove(pull)
        self._pool.release(pull.held + blocks, pull.sequence.hold)
        self._is_over(pull)

    def _is_over(self, pull: Pulling) -> None:
        pull.is_over = True
        self._wake()

    def _count(self, **added: int) -> None:
        summed = {name: getattr(self.totals, name) + amount for name, amount in added.items()}
        self.totals = msgspec.structs.replace(self.totals, **summed)
