"""The prefix index has what the pool has, whatever announcement is lost on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator

from engine.cache.block_pool import BlockPool
from worker.heartbeat import IndexNews
from worker.tier.file_blocks import FileBlocks
from worker.tier.host_blocks import HostBlocks
from worker.tier.host_store import PrivateStore
from worker.tier.kv_files import Stored

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


class Tiers:
    """Host memory, and files below it."""

    depth = 2

    def __init__(self) -> None:
        self.host, self.files = HostBlocks(PrivateStore(20)), FileBlocks(1 << 30, {})

    def tier_of(self, digest: bytes) -> int | None:
        return 1 if digest in self.host else 2 if digest in self.files else None

    def __iter__(self) -> Iterator[bytes]:
        return iter({*self.host, *self.files})

    def resumes(self, digest: bytes) -> bool:
        return True

    def drain_changed(self) -> list[bytes]:
        return self.host.drain_changed() + self.files.drain_removed()

    def names(self, pool: BlockPool) -> set[bytes]:
        """Names of blocks that the index should have."""
        here, below = set(pool.cached_digests()), {*self}
        return {
            *here,
            *below,
            *(each + b"\1" for each in below - here),
            *(each + b"\2" for each in below - here if each not in self.host),
        }


def test_the_index_has_what_lower_tiers_have_and_says_in_which() -> None:
    chance = random.Random(5)
    pool, tiers, index = BlockPool(num_blocks=BLOCKS, block_size=16), Tiers(), set[bytes]()
    host, files, news = tiers.host, tiers.files, IndexNews(pool, tiers)
    for step in range(600):
        digest = b"content %d" % chance.randrange(40)
        if not pool.has(0, digest):
            use(pool, digest)
        if digest not in host and chance.random() < 0.7:
            write = host.reserve(digest, {0: 1})
            assert write is not None
            write.sums = {0: b""}
            host.add(write)
        if digest in host and chance.random() < 0.5:
            files.add(digest, Stored(frozenset((0,)), 1))
        if chance.random() < 0.1:
            host.forget(digest)
        if chance.random() < 0.1:
            files.forget(b"content %d" % chance.randrange(40))
        added, removed = news.next()
        assert set(added).isdisjoint(removed) or not news.is_known
        if chance.random() < 0.6:
            index = (index | set(added)) - set(removed)
            news.told()
            assert index == tiers.names(pool), step
        else:
            news.forget()
