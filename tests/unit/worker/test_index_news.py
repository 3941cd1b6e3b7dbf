"""The prefix index has what the pool has, whatever announcement is lost on the way."""

from __future__ import annotations

import random

from engine.cache.block_pool import BlockPool
from engine.groups import Full, Window
from worker.heartbeat import IndexNews
from worker.tier.host_blocks import HostBlocks

BLOCKS = 8


def use(pool: BlockPool, digest: bytes) -> None:
    """A block with this content is computed, and released: it is cached until its place is needed."""
    (block,) = pool.allocate(1)
    pool.publish(block, digest)
    pool.release([block])


def test_a_lost_announcement_leaves_nothing_behind_in_the_index() -> None:
    chance = random.Random(3)
    pool, index = BlockPool(num_blocks=BLOCKS, block_size=16), set[bytes]()
    news = IndexNews(pool)
    for step in range(400):
        use(pool, b"content %d" % chance.randrange(30))
        added, removed = news.next()
        arrives, is_answered = chance.random() < 0.6, chance.random() < 0.7
        if arrives:
            index |= set(added)
            index -= set(removed)
        if arrives and is_answered:
            news.told()
            assert index == set(pool.cached_digests()), step
        else:
            news.forget()


def test_nothing_is_told_twice() -> None:
    pool = BlockPool(num_blocks=BLOCKS, block_size=16)
    news = IndexNews(pool)
    use(pool, b"one")
    assert news.next() == ([b"one"], [])
    news.told()
    assert (news.next(), news.is_known) == (([], []), True)


def test_an_index_that_was_emptied_is_told_everything() -> None:
    pool = BlockPool(num_blocks=BLOCKS, block_size=16)
    news = IndexNews(pool)
    use(pool, b"one")
    news.next()
    news.told()
    news.forget()
    assert news.next() == ([b"one"], [])


def test_the_index_has_what_a_host_tier_has_too() -> None:
    chance = random.Random(5)
    pool, host, index = BlockPool(num_blocks=BLOCKS, block_size=16), HostBlocks(20), set[bytes]()
    news = IndexNews(pool, host)
    for step in range(400):
        digest = b"content %d" % chance.randrange(40)
        if not pool.has(0, digest):
            use(pool, digest)
        if digest not in host and chance.random() < 0.7:
            slots = host.reserve({0: 1})
            assert slots is not None
            host.add(digest, slots, {0: b""})
        if chance.random() < 0.1:
            host.forget(digest)
        added, removed = news.next()
        if chance.random() < 0.6:
            index = (index | set(added)) - set(removed)
            news.told()
            assert index == {*pool.cached_digests(), *host}, step
        else:
            news.forget()


def test_of_several_groups_the_index_hears_of_the_pool_alone() -> None:
    groups = (Full(block_size=16), Window(block_size=16, window=40))
    pool, host = BlockPool(num_blocks=BLOCKS, block_size=16, groups=groups), HostBlocks(20)
    host.add(b"there", {0: (0,)}, {0: b""})
    news = IndexNews(pool, host)
    assert news.next() == ([], [])
    host.forget(b"there")
    assert news.next() == ([], [])
    assert host.drain_removed() == []  # nothing piles up
