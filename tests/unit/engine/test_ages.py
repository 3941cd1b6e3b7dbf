"""Ages of cached blocks: lifetime, idle time at eviction, and time between uses."""

from __future__ import annotations

from common.messages import AGE_BOUNDS_S, Ages
from engine.cache.block_pool import BlockPool
from engine.cache.changes import WATCHED, BlockAges
from engine.cache.retention import Retention


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ages(*seconds: float) -> Ages:
    counts = [0] * (len(AGE_BOUNDS_S) + 1)
    for each in seconds:
        counts[sum(each > bound for bound in AGE_BOUNDS_S)] += 1
    return Ages(counts=counts, sum_s=sum(seconds))


def test_a_block_is_followed_from_its_first_release_to_its_eviction() -> None:
    clock = Clock()
    watched = BlockAges(clock)
    watched.released([0, 1, WATCHED])
    clock.now += 3
    watched.found([0, 1])
    watched.found([0])  # by another that has it at the same time
    clock.now += 10
    watched.released([0, 1])
    clock.now += 5000
    watched.evicted([0, 1, WATCHED])
    assert watched.told() == (ages(5013, 5013), ages(5000, 5013), ages(3))
    watched.evicted([0])
    assert watched.told()[0] == ages(5013, 5013)


def test_contents_that_are_forgotten_are_not_counted() -> None:
    clock = Clock()
    watched = BlockAges(clock)
    watched.released([0])
    watched.forget(0)
    clock.now += 9
    watched.released([0])
    clock.now += 1
    watched.evicted([0])
    assert watched.told() == (ages(1), ages(1), ages())


def test_a_pool_tells_of_all_of_it() -> None:
    clock = Clock()
    retention = Retention(2 * WATCHED, clock=clock)
    pool = BlockPool(num_blocks=2 * WATCHED, block_size=1, retention=retention)
    digests = [bytes([block]) for block in range(2 * WATCHED)]
    blocks = pool.allocate(2 * WATCHED)
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    clock.now += 2
    pool.release(pool.match_prefix(digests))
    clock.now += 20
    pool.allocate(2 * WATCHED)
    assert retention.ages.told() == (ages(22, 22), ages(20, 20), ages(2, 2))
