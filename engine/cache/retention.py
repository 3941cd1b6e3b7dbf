"""Retention: the order in which published blocks go that nobody holds. No digests, no references, no tensors.

Blocks stand in levels, in each the one released longest ago first, and the lowest level goes first. A policy says the level,
from how often a block was found and from the hold under which it was released.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from common.messages import EvictedBlocks, Keep
from engine.cache.changes import BlockAges
from engine.sequence import Hold

MAX_SPARED_SHARE = 0.5  # largest share of the pool that a level above UNUSED holds
# Levels. Kept blocks of the lowest tier are one below KEPT, of the highest one above.
SPENT, UNUSED, FOUND, KEPT = 0, 1, 2, 4
NUM_LEVELS = 6

# Numbers of reasons, in the order of `EvictedBlocks`: first the levels of blocks that nobody asked to keep.
_KEPT_GONE, _SURPLUS = 3, 4


class Policy(NamedTuple):
    """The levels of blocks: `plain` by hits (further ones count as the last), `held` by hits, hold and the time."""

    plain: tuple[int, ...]
    held: Callable[[int, Hold, float], int]


def _combined(hits: int, hold: Hold, now: float) -> int:
    """Time to live first, then use and priority."""
    return KEPT + hold.tier if hold.until > now else min(max(UNUSED + hits + hold.tier, SPENT), FOUND)


_FREQUENT = (UNUSED, FOUND, FOUND + 1, FOUND + 1, FOUND + 2)

COMBINED = Policy((UNUSED, FOUND), _combined)
POLICIES: dict[str, Policy] = {
    "combined": COMBINED,
    "lru": Policy((UNUSED,), lambda hits, hold, now: UNUSED),
    "lfu": Policy(_FREQUENT, lambda hits, hold, now: _FREQUENT[hits]),
    "ttl": Policy((UNUSED,), lambda hits, hold, now: KEPT if hold.until > now else UNUSED),
}


@dataclass(slots=True, eq=False)
class _Share:
    """A tenant's blocks by level, and how many may be there while others need room."""

    most: float
    levels: list[OrderedDict[int, None]] = field(default_factory=lambda: [OrderedDict() for _ in range(NUM_LEVELS)])
    count: int = 0


class Retention:
    """Published blocks without a reference, and the next victim among them.

    Each operation costs O(1) a block, besides O(log n) for each time to live, and O(1) for each block whose time ends or whose
    state was superseded. Above UNUSED a level holds `MAX_SPARED_SHARE` of the pool at most: the one released longest ago falls.
    A tenant with a share gives first what it has beyond that. What several released is common, and counts as
    nobody's.

    A state is superseded once newer ones of its session have half of its blocks: the others go first.
    """

    def __init__(self, num_blocks: int, policy: Policy = COMBINED, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self.ages = BlockAges(clock)
        self._gone = [0] * len(EvictedBlocks.__struct_fields__)
        self._policy = policy
        self._clock = clock
        self._bound = MAX_SPARED_SHARE * num_blocks
        self._most_hits = len(policy.plain) - 1
        self._hits = [0] * num_blocks
        self._levels: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(NUM_LEVELS)]
        self._level = [-1] * num_blocks  # a cached block's; -1: nobody released it
        self._tenants: dict[int, str | None] = {}  # with a share, a block each; None: it is common
        self._holds: dict[int, Hold] = {}  # a published block each
        self._timed: list[tuple[float, int, Hold]] = []  # a heap
        self._serial = count()
        self._num_blocks = num_blocks
        self._shares: dict[str, _Share] = {}
        self._over: dict[str, _Share] = {}  # those with too many blocks

    def __iter__(self) -> Iterator[int]:
        """The blocks in the order of eviction, as far as no time to live ends and no tenant has more than its share."""
        return chain(*self._levels)

    @property
    def evicted(self) -> EvictedBlocks:
        """Evicted blocks by reason."""
        return EvictedBlocks(**dict(zip(EvictedBlocks.__struct_fields__, self._gone, strict=True)))

    # -- the pool tells --------------------------------------------------------------------------------------------------

    def add(self, blocks: Sequence[int], hold: Hold | None = None) -> None:
        """Take in blocks that lost their last reference, the first to go first. Without a hold they stay under their own."""
        self.count += len(blocks)
        self.ages.released(blocks)
        if hold is not None or self._holds or self._tenants:
            self._add_held(blocks, hold)
            return
        levels, level_of, hits, plain = self._levels, self._level, self._hits, self._policy.plain
        for block in blocks:
            level = level_of[block] = plain[hits[block]]
            levels[level][block] = None
            if level > UNUSED and len(levels[level]) > self._bound:
                self._overflow(level)

    def release_shared(self, blocks: Sequence[int], hold: Hold) -> None:
        """Record that blocks were released that others still hold."""
        if hold.keep.tenant:
            for block in blocks:
                self._released(block, hold.keep.tenant)

    def _released(self, block: int, tenant: str) -> None:
        first = self._tenants.get(block, tenant if self._level[block] < 0 else "")
        if first != tenant:
            self._tenants[block] = None
        elif tenant:
            self._tenants[block] = tenant

    def take(self, blocks: Sequence[int]) -> None:
        """Let blocks go that are held again, or freed."""
        self.count -= len(blocks)
        levels, level_of = self._levels, self._level
        if self._shares:
            for block in blocks:
                self._drop(block)
            return
        for block in blocks:
            del levels[level_of[block]][block]

    def found(self, blocks: Sequence[int]) -> None:
        """Count a hit of each."""
        self.ages.found(blocks)
        hits, most = self._hits, self._most_hits
        for block in blocks:
            if hits[block] < most:
                hits[block] += 1

    def charged(self, block: int) -> Keep | None:
        """The wish whose tenant is charged with a released block, as a part of its share."""
        hold = self._holds.get(block) if self._holds else None
        return hold.keep if hold is not None and self._is_charged(block, hold) else None

    def was_found(self, block: int) -> bool:
        """True if a hit of it counts."""
        return self._hits[block] > 0

    def inherit(self, block: int, before: int) -> None:
        """Take a block's hits and tenants over from another with the same content."""
        self._hits[block], self._level[block] = self._hits[before], self._level[before]
        if before in self._tenants:
            self._tenants[block] = self._tenants[before]

    def forget(self, block: int) -> None:
        """Forget a block's contents, which are nobody's now."""
        self._hits[block], self._level[block] = 0, -1
        self._tenants.pop(block, None)
        self.ages.forget(block)
        if self._holds and (hold := self._holds.pop(block, None)) is not None:
            hold.blocks.pop(block, None)

    def evict(self, count: int) -> list[int]:
        """Let the next victims go, and forget them."""
        self.count -= count
        if self._holds:
            return [self._evict_held() for _ in range(count)]
        victims = list[int]()
        while lacking := count - len(victims):
            level = UNUSED if self._levels[UNUSED] else FOUND
            blocks = self._levels[level] or next(filter(None, self._levels))
            going = min(lacking, len(blocks))
            victims += [blocks.popitem(last=False)[0] for _ in range(going)]
            self._gone[level] += going
        self.ages.evicted(victims)
        for block in victims:
            self._hits[block], self._level[block] = 0, -1
        if self._tenants:
            for block in victims:
                self._tenants.pop(block, None)
        return victims

    def _evict_held(self) -> int:
        if self._timed and self._timed[0][0] <= (now := self._clock()):
            self._expire(now)
        share = next(iter(self._over.values())) if self._over else None
        levels = self._levels if share is None else share.levels
        level = next(level for level, blocks in enumerate(levels) if blocks)
        block = next(iter(levels[level]))
        self._drop(block)
        self.ages.evicted((block,))
        self._gone[self._reason(block, level) if share is None else _SURPLUS] += 1
        self.forget(block)
        return block

    def _reason(self, block: int, level: int) -> int:
        hold = self._holds.get(block) if level > FOUND else None
        return min(level, FOUND) if hold is None or hold.until == -math.inf else _KEPT_GONE

    # -- holds -----------------------------------------------------------------------------------------------------------

    def _add_held(self, blocks: Sequence[int], hold: Hold | None) -> None:
        now, superseded = self._clock(), dict[Hold, None]()
        if hold is not None and blocks:
            self._renew(hold, now)
        tenant = "" if hold is None else hold.keep.tenant
        for block in blocks:
            self._released(block, tenant)
            before = self._holds.get(block)
            own = before
            if hold is not None and before is not hold and (before is None or _gives_way(before, hold, now)):
                own = self._holds[block] = hold
                hold.blocks[block] = None
                if before is not None:
                    before.num_handed_on += hold.follows(before)
                    before.blocks.pop(block, None)
                    superseded[before] = None
            hits = self._hits[block]
            self._put(block, self._policy.plain[hits] if own is None else self._policy.held(hits, own, now))
        for state in superseded:
            if state.num_handed_on >= len(state.blocks):
                self._supersede(state)

    def _renew(self, hold: Hold, now: float) -> None:
        if not hold.keep.ttl_s:
            return
        hold.until = now + hold.keep.ttl_s
        if not hold.is_timed:
            hold.is_timed = True
            heapq.heappush(self._timed, (hold.until, next(self._serial), hold))
            if len(self._timed) > 2 * self._num_blocks:  # most of them have no block any more
                for _, _, each in self._timed:
                    each.is_timed = bool(each.blocks) or each is hold
                self._timed = [each for each in self._timed if each[2].is_timed]
                heapq.heapify(self._timed)

    def extend(self, hold: Hold) -> None:
        """Begin a hold's time to live, though its blocks were released before; not of a superseded state."""
        if hold.num_handed_on < len(hold.blocks):
            self._renew(hold, now := self._clock())
            for block in filter(self._is_here, hold.blocks):
                self._drop(block)
                self._put(block, self._policy.held(self._hits[block], hold, now))

    def _supersede(self, state: Hold) -> None:
        """Let the rest of a state go first."""
        state.until = -math.inf
        for block in state.blocks:
            if self._is_here(block):
                self._drop(block)
                self._put(block, SPENT)

    def _expire(self, now: float) -> None:
        """Blocks whose time to live ended are the first among their equals."""
        while self._timed and self._timed[0][0] <= now:
            _, serial, hold = heapq.heappop(self._timed)
            if hold.until > now:
                heapq.heappush(self._timed, (hold.until, serial, hold))
                continue
            hold.is_timed = False
            for block in reversed(hold.blocks):
                if self._is_here(block) and self._level[block] > FOUND:
                    self._drop(block)
                    level = self._policy.held(self._hits[block], hold, now)
                    self._put(block, level)
                    self._levels[self._level[block]].move_to_end(block, last=False)

    # -- levels ----------------------------------------------------------------------------------------------------------

    def _is_here(self, block: int) -> bool:
        return block in self._levels[self._level[block]]

    def _put(self, block: int, level: int) -> None:
        self._level[block] = level
        blocks = self._levels[level]
        blocks[block] = None
        hold = self._holds.get(block) if self._holds else None
        if hold is not None and self._is_charged(block, hold):
            tenant = hold.keep.tenant
            share = self._shares.setdefault(tenant, _Share(0))
            share.most = hold.keep.share * self._num_blocks  # it may have changed
            share.levels[level][block] = None
            share.count += 1
            if share.count > share.most:
                self._over[tenant] = share
        if level > UNUSED and len(blocks) > self._bound:
            self._overflow(level)

    def _is_charged(self, block: int, hold: Hold) -> bool:
        return hold.keep.share < 1 and self._tenants.get(block, "") is not None

    def _drop(self, block: int) -> None:
        level = self._level[block]
        del self._levels[level][block]
        hold = self._holds.get(block) if self._shares else None
        if hold is None or not self._is_charged(block, hold):
            return
        tenant = hold.keep.tenant
        share = self._shares[tenant]
        del share.levels[level][block]
        share.count -= 1
        if share.count <= share.most:
            self._over.pop(tenant, None)
        if not share.count:
            del self._shares[tenant]

    def _overflow(self, level: int) -> None:
        """Move the block released longest ago to the end of the level below; out of all kept ones alike."""
        oldest = next(iter(self._levels[level]))
        is_wish_alone = level > FOUND and not self._hits[oldest]
        below = UNUSED if is_wish_alone else max(UNUSED, min(level - 1, FOUND))
        if self._holds:
            self._drop(oldest)
            self._put(oldest, below)
        else:
            del self._levels[level][oldest]
            self._level[oldest] = below
            self._levels[below][oldest] = None
            if below > UNUSED and len(self._levels[below]) > self._bound:
                self._overflow(below)
        self._hits[oldest] //= 2


def _gives_way(before: Hold, hold: Hold, now: float) -> bool:
    """True unless another's wish holds longer, or ranks higher."""
    return hold.follows(before) or (before.tier <= hold.tier and before.until <= max(now, hold.until))
