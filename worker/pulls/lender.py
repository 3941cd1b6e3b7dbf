"""The lending end of pulls: cached blocks are held, pushed to the peer that asked for them, and let go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from itertools import chain

from common.blocks import DIGEST_BYTES, unpack_tokens
from common.messages import Ack, PullBlocks, PullReply, StopPull
from engine.cache.block_pool import BlockPool
from kvtransfer.plan import blocks_per_entry
from kvtransfer.sender import Run
from kvtransfer.transport import TransferError, Transfers, push_run
from worker.identity import Identity
from worker.pulls.loads import Loads
from worker.serving.allocation import cargo_of
from worker.serving.turns import Turns
from worker.tier.host_tier import HostTier
from worker.tier.in_flight import Lent

log = logging.getLogger("baton.pulls")

MOST_LENT = 4  # pushes at a time: further ones would share the links with handoffs
# A prefix comes back from lower tiers to be lent if it takes no more of the pool, and no more of the pull's time.
MOST_OF_POOL, LOAD_SHARE = 0.5, 0.5
MAX_ENDED = 10_000  # pulls remembered, so that one that arrives late or twice writes nothing
NOTHING = PullReply()

Key = tuple[str, int, int, int]  # receiver, its incarnation, lease, generation


class Lender:
    """Pushes this worker's cached blocks to peers, after it brought back what lower tiers have of them.

    A pull of another incarnation of this worker gets nothing.
    """

    def __init__(
        self, *, identity: Identity, pool: BlockPool, transfers: Transfers, turns: Turns, tier: HostTier | None = None
    ) -> None:
        self._identity = identity
        self._pool = pool
        self._transfers = transfers
        self._turns = turns
        self._loads = None
        if tier is not None:
            self._loads, tier.is_asked = Loads(tier), True
        self._lending: dict[Key, asyncio.Task[PullReply]] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._is_closed = False

    async def handle(self, message: PullBlocks | StopPull) -> PullReply | Ack:
        if isinstance(message, StopPull):
            return await self._stop(message)
        return await self._lend(message)

    async def close(self) -> None:
        """Stop all pushes, and wait until no write is in flight."""
        self._is_closed = True
        for key in list(self._lending):
            await self._end(key)

    def reopen(self) -> None:
        """Lend again, after `close`."""
        self._is_closed = False

    async def _lend(self, message: PullBlocks) -> PullReply:
        """Push what is cached of the prefix; return once no write is in flight, also to a question that comes twice."""
        pushing = self._lending.get(_key(message)) or self._begun(message)
        if pushing is None:
            return NOTHING
        await asyncio.wait([pushing])
        return NOTHING if pushing.cancelled() else pushing.result()

    def _begun(self, message: PullBlocks) -> asyncio.Task[PullReply] | None:
        """The push for a new question; None if it gets nothing."""
        key = _key(message)
        is_ours = message.lender_incarnation == self._identity.incarnation
        is_its = message.region.incarnation == message.incarnation
        is_late = self._is_closed or key in self._ended
        if not (is_ours and is_its) or is_late or len(self._lending) >= MOST_LENT:
            return None
        self._remember(key)
        pushing = self._lending[key] = asyncio.create_task(self._push(message))
        pushing.add_done_callback(lambda _: self._lending.pop(key, None))
        return pushing

    async def _push(self, message: PullBlocks) -> PullReply:
        pool, packed = self._pool, message.digests
        digests = [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]
        loading_ms = await self._bring(digests, message)
        found = pool.match_resumable(digests)
        try:
            count, targets = len(found[0]), unpack_tokens(message.destination_blocks)
            if count <= message.first_block:
                return NOTHING
            cargo = cargo_of(pool, count * pool.block_size)
            wanted = cargo.of_blocks(blocks_per_entry(message.region.layout))  # a peer's width may differ
            items = wanted.lacking([message.first_block, *[0] * (len(found) - 1)])
            if len(items) > len(targets):
                return NOTHING
            tables = [[()] * part.first + entries for part, entries in zip(cargo.groups, found, strict=True)]
            link = await self._transfers.connect(message.region)
            run = Run(items=items, destination_blocks=targets[: len(items)])
            lease, left_s = (message.lease_id, message.generation), max(0, message.remaining_ms - loading_ms) / 1000
            sums = await push_run(link, run, tables, lease=lease, timeout_s=left_s)
            return PullReply(count=count, digests=sums, loading_ms=loading_ms)
        except TransferError as error:
            log.warning("pulls.not_lent", extra={"worker": message.worker, "error": str(error)})
            return NOTHING
        finally:
            pool.release([*chain(*chain(*found))])

    async def _bring(self, digests: list[bytes], message: PullBlocks) -> int:
        """Load what lower tiers have of a prefix, if that leaves room to those who wait for it; the milliseconds that took."""
        if self._loads is None:
            return 0
        pool, began, prefix = self._pool, time.monotonic(), Lent(digests)
        num_blocks = len(cargo_of(pool, len(digests) * pool.block_size).lacking([0] * len(pool.groups)))

        def has_room() -> bool:
            room = pool.num_free - self._turns.kept_from(prefix)
            return num_blocks <= min(room, MOST_OF_POOL * pool.num_blocks)

        await self._loads.bring(prefix, within_s=LOAD_SHARE * message.remaining_ms / 1000, has_room=has_room)
        return round(1000 * (time.monotonic() - began))

    async def _stop(self, message: StopPull) -> Ack:
        if message.lender_incarnation != self._identity.incarnation:
            return Ack(known=False)
        key = _key(message)
        self._remember(key)
        await self._end(key)
        return Ack(known=True)

    async def _end(self, key: Key) -> None:
        pushing = self._lending.get(key)
        if pushing is not None:
            pushing.cancel()
            await asyncio.wait([pushing])  # a write that can't be stopped is waited for

    def _remember(self, key: Key) -> None:
        self._ended[key] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _key(message: PullBlocks | StopPull) -> Key:
    return message.worker, message.incarnation, message.lease_id, message.generation
