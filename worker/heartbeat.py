"""A worker's heartbeats, its registration in Redis, and its blocks in the prefix index."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from common import subjects
from common.blocks import hash_blocks, hash_root
from common.errors import UnavailableError
from common.messages import Feature, KVLayout, WorkerState, said_features
from common.store import Store
from engine.cache.block_pool import BlockPool
from engine.cache.pages import blocks_of_a_sequence
from worker.context import RoleContext
from worker.device.pipeline import Pipeline
from worker.settings import WorkerSettings

HEARTBEAT_S = 0.5
REGISTER_S = 1.0
ANNOUNCE_S = 0.1
MAX_GONE = 100_000  # digests to remove; older ones expire by their TTL


class Whole(NamedTuple):
    """The longest sequence that the model or the operator allows, and the KV cache that it needs."""

    tokens: int
    memory_mb: int

    @classmethod
    def of(cls, layout: KVLayout, tokens: int) -> Whole:
        return cls(tokens, -(-blocks_of_a_sequence(layout, tokens) * layout.block_bytes // (1 << 20)))


class Heartbeat:
    """Publishes the worker's state to gateways, other workers and Redis."""

    def __init__(
        self,
        context: RoleContext,
        *,
        pipeline: Pipeline,
        store: Store,
        settings: WorkerSettings,
        fingerprint: str,
        whole: Whole,
    ) -> None:
        """`fingerprint`: the model's."""
        self._context = context
        self._pipeline = pipeline
        self._store = store
        self._settings = settings
        self._fingerprint = fingerprint
        self._whole = whole
        self._news = IndexNews(context.cache.pool, context.cache.tier)

    def state(self) -> WorkerState:
        context, settings, budget = self._context, self._settings, self._context.passes.budget
        loads, puller = [role.load() for role in context.roles.all], context.cache.puller
        return WorkerState(
            worker=context.identity.worker,
            incarnation=context.identity.incarnation,
            roles=context.roles.names,
            status=context.roles.status,
            model=settings.served.name,
            model_fingerprint=self._fingerprint,
            tokenizer_fingerprint=settings.served.tokenizer_fingerprint,
            files_fingerprint=settings.served.files_fingerprint,
            vocab_size=context.model.vocab_size,
            max_model_len=context.model.max_model_len,
            whole_len=self._whole.tokens,
            whole_kv_mb=self._whole.memory_mb,
            region=context.transfers.region.public,
            parity_hash=parity_hash(self._fingerprint, context.cache.layout),
            steps=self._pipeline.steps,
            busy=self._pipeline.busy,
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            queued_tokens=sum(load.queued_tokens for load in loads),
            held_blocks=sum(load.held_blocks for load in loads) + (puller.table.held_blocks if puller else 0),
            free_blocks=context.cache.pool.num_free,
            max_sequences=context.model.max_sequences,
            prefill_tokens_per_s=budget.prompt_cost.average_tokens_per_s,
            decode_step_ms=budget.step_cost.bare_ms,
            prefill_fixed_ms=budget.prompt_cost.average_fixed_ms,
            prefill_bare_tokens_per_s=budget.prompt_cost.tokens_per_s,
            prefill_bare_fixed_ms=budget.prompt_cost.fixed_ms,
            prefill_double_tokens=budget.prompt_cost.double_tokens,
            local_tokens_per_s=budget.local_tokens_per_s,
            link_bytes_per_s=max((load.link_bytes_per_s for load in loads), default=0.0),
            totals=context.totals.as_message(
                preemptions=sum(load.preemptions for load in loads),
                bad_digests=sum(load.bad_digests for load in loads),
                expired_jobs=context.jobs.expired,
                lost_frames=context.outbox.lost_frames,
                malformed=context.messenger.bus.malformed,
                dead_letters=context.messenger.bus.dead_letters,
                forged=context.messenger.bus.forged,
                pass_s=self._pipeline.pass_s,
                host=None if context.cache.tier is None else context.cache.tier.totals(),
                disk=None if context.cache.tier is None else context.cache.tier.file_totals(),
                evicted=context.cache.pool.retention.evicted,
                ages=context.cache.pool.retention.ages.told(),
                pulls=puller.totals if puller else None,
            ),
            drafter=settings.drafter,
            pull_bytes_per_s=self._pull_bytes_per_s(),
            **said_features(lacking=self._lacking()),
        )

    def _pull_bytes_per_s(self) -> float:
        puller, others = self._context.cache.puller, self._context.messenger.peers.states.values()
        links = (state.link_bytes_per_s for state in others)
        return 0.0 if puller is None else puller.rate.bytes_per_s(links, time.monotonic())

    def _lacking(self) -> list[Feature]:
        has = {
            Feature.GRAMMARS: self._context.model.grammars.available,
            Feature.PULLS: self._context.cache.puller is not None,
        }
        return [feature for feature, is_there in has.items() if not is_there]

    async def beat(self) -> None:
        """Send a heartbeat, and set the step target by the fleet's present roles."""
        context = self._context
        roles = (state.roles for state in context.messenger.peers.states.values())
        targets, budget = self._settings.step_targets, context.passes.budget
        budget.target_ms, budget.follows_goals = targets.chosen_ms(roles), targets.follow_goals
        await context.messenger.bus.publish(subjects.heartbeat(context.identity.worker), self.state())

    async def beat_if_possible(self) -> None:
        """Send an extra heartbeat; failure is harmless, the next one repeats it."""
        with contextlib.suppress(UnavailableError):
            await self.beat()

    async def register(self) -> None:
        """Renew the registration. If it was lost, the index may be lost, too."""
        if await self._store.register(self.state()):
            self._news.forget()

    async def unregister(self) -> None:
        identity = self._context.identity
        await self._store.unregister(identity.worker, identity.incarnation)

    async def tell(self) -> None:
        """Announce at once which work this worker takes; the next heartbeats repeat it."""
        for telling in (self.beat, self.register):
            with contextlib.suppress(UnavailableError):
                await telling()

    async def announce(self) -> None:
        """Keep the prefix index in sync with the pool; announce everything again after a flush or a failed call."""
        identity = self._context.identity
        added, removed = self._news.next()
        if self._news.is_known and not added and not removed:
            return
        self._news.forget()
        for length in sorted({len(name) for name in (*added, *removed)}):
            come, go = ([name for name in names if len(name) == length] for names in (added, removed))
            await self._store.announce(identity.worker, identity.incarnation, come, go)
        self._news.told()


def parity_hash(fingerprint: str, layout: KVLayout) -> bytes:
    """The block hash of the probe prompt `0, 1, …` of two blocks.

    A gateway that computes another one must not place requests here.
    """
    root = hash_root(model=fingerprint, kv_dtype=layout.dtype, block_size=layout.block_size)
    return hash_blocks(root, range(2 * layout.block_size), layout.block_size)[-1]


class LowerTiers(Protocol):
    """The tiers of a prompt's blocks beside the pool, numbered from 1."""

    @property
    def depth(self) -> int: ...

    def tier_of(self, digest: bytes) -> int | None:
        """The first tier that has a block."""

    def resumes(self, digest: bytes) -> bool:
        """True if a block of a tier, or of the pool with what tiers have, is a prefix's that can be resumed."""

    def __iter__(self) -> Iterator[bytes]: ...

    def drain_changed(self) -> list[bytes]:
        """Digests that came to a tier or left it since the last call."""


class IndexNews:
    """Unconfirmed updates: a failed announcement may or may not have arrived.

    The index has a block of tier 2 under three names: its digest, and this with a byte for each tier down to its own. So who
    knows no tiers finds it, too, and placement counts what has to be loaded.
    """

    def __init__(self, pool: BlockPool, lower: LowerTiers | None = None) -> None:
        """News of the pool and the tiers below it. Of several groups the index hears of prefixes that can be resumed."""
        self._pool, self._lower = pool, lower
        self._is_known = False
        self._gone: dict[bytes, None] = {}

    def forget(self) -> None:
        """Announce everything again: the index may have lost it."""
        self._is_known = False

    def next(self) -> tuple[list[bytes], list[bytes]]:
        """Digests to add and to remove. Call `told` once the index has them."""
        added, removed = self._pool.drain_events()
        if not self._is_known:
            added = self._pool.cached_digests()
        if self._lower is not None:
            added, removed = self._names(self._lower, [*added, *removed, *self._lower.drain_changed()])
        self._gone |= dict.fromkeys(removed)
        for digest in added:
            self._gone.pop(digest, None)
        for digest in list(self._gone)[: max(0, len(self._gone) - MAX_GONE)]:
            del self._gone[digest]
        return added, list(self._gone)

    def _names(self, lower: LowerTiers, changed: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Names of these blocks to add and to remove, by the first tier that has each."""
        added, removed = list[bytes](), list[bytes]()
        here = set(changed) if self._is_known else {*changed, *lower}
        for digest in here:
            is_of_use = self._pool.is_resumable(digest) or lower.resumes(digest)
            tier = 0 if self._pool.has(0, digest) else lower.tier_of(digest)
            names = [digest, *(digest + bytes([at + 1]) for at in range(lower.depth))]
            count = tier + 1 if is_of_use and tier is not None else 0
            added += names[:count]
            removed += names[count:]
        return added, removed

    @property
    def is_known(self) -> bool:
        """True if the index has everything but the next update."""
        return self._is_known

    def told(self) -> None:
        """Confirm what `next` returned."""
        self._is_known = True
        self._gone.clear()
