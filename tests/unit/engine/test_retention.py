"""Retention: which cached block goes first, by use, time to live, priority, session and tenant."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.messages import NO_KEEP, EvictedBlocks, Keep
from engine.cache.block_pool import BlockPool
from engine.cache.retention import FOUND, MAX_SPARED_SHARE, POLICIES, UNUSED, Retention
from engine.cache.returning import Returning
from engine.sequence import Hold
from tests.examples import examples


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(ttl_s: float = 0.0, *, session: str = "", priority: int = 0, tenant: str = "", share: float = 1.0) -> Hold:
    hold = Hold.of(Keep(ttl_s=ttl_s, session=session, tenant=tenant, share=share), priority)
    assert hold is not None
    return hold


def order(retention: Retention) -> list[int]:
    return retention.evict(retention.count)


def test_who_says_nothing_has_no_hold() -> None:
    assert Hold.of(NO_KEEP, 0) is None
    assert Hold.of(Keep(ttl_s=0.0), 0) is None


def test_without_wishes_unused_blocks_go_before_found_ones_each_by_age() -> None:
    retention = Retention(8)
    retention.found([1, 3])
    retention.add([1, 2, 3, 4])
    assert list(retention) == [2, 4, 1, 3]
    assert order(retention) == [2, 4, 1, 3]
    assert retention.evicted == EvictedBlocks(unused=2, found=2)


def test_beyond_half_of_the_pool_the_found_block_released_longest_ago_counts_as_unused() -> None:
    retention = Retention(4)
    retention.found([0, 1, 2])
    retention.add([0, 1, 2, 3])
    assert order(retention) == [0, 3, 1, 2]


def test_wishes_beyond_half_of_the_pool_push_nothing_out_that_was_found() -> None:
    retention = Retention(8, clock=Clock())
    retention.found([0, 1])
    retention.add([0, 1])
    retention.add([2, 3, 4, 5, 6, 7], kept(60))
    assert retention.evict(2) == [2, 3]


def test_a_time_to_live_outlasts_use_until_it_ends() -> None:
    clock = Clock()
    retention = Retention(8, clock=clock)
    retention.add([0, 1], kept(60))
    retention.found([2])
    retention.add([2, 3])
    assert list(retention) == [3, 2, 0, 1]
    clock.now = 61
    assert retention.evict(1) == [0]  # as old as it is
    assert order(retention) == [1, 3, 2]
    assert retention.evicted.kept == 0


def test_use_renews_a_time_to_live() -> None:
    clock = Clock()
    retention, hold = Retention(8, clock=clock), kept(60)
    retention.add([0], hold)
    clock.now = 50
    retention.take([0])
    retention.add([0], hold)
    retention.add([1])
    clock.now = 70
    assert order(retention) == [1, 0]
    assert retention.evicted.kept == 1


@pytest.mark.parametrize("is_told_before", [True, False])
@pytest.mark.parametrize("wish_s", [0.0, 10.0])
def test_an_end_by_a_call_keeps_blocks_for_its_time(is_told_before: bool, wish_s: float) -> None:
    clock = Clock()
    retention = Retention(8, clock=clock)
    returning, hold = Returning(retention), Hold.of(Keep(ttl_s=wish_s, call_ttl_s=60), 0, "r")
    assert hold is not None
    for request in ("r", "unknown")[not is_told_before :]:
        returning.called(request)
    returning.releasing(hold)
    retention.add([0, 1], hold)
    retention.add([2, 3])
    if not is_told_before:
        returning.called("r")
    clock.now = 59
    assert order(retention) == ([0, 1, 2, 3] if wish_s else [2, 3, 0, 1])


def test_without_a_call_a_request_with_tools_has_no_wish() -> None:
    retention = Retention(8)
    returning, hold = Returning(retention), Hold.of(Keep(call_ttl_s=60, session="s"), 0, "r")
    assert hold is not None
    returning.releasing(hold)
    retention.add([0, 1, 2], hold)
    retention.take([1, 2])
    retention.add([1, 2], kept(session="s"))  # it is superseded
    returning.called("r")
    retention.add([3])
    assert order(retention) == [0, 1, 2, 3]


def test_another_ones_shorter_wish_does_not_shorten_a_longer_one() -> None:
    clock = Clock()
    retention = Retention(8, clock=clock)
    retention.add([0], kept(3600))
    retention.take([0])
    retention.add([0], kept(10, session="b"))
    retention.take([0])
    retention.add([0, 1])  # says nothing
    clock.now = 100
    assert order(retention) == [1, 0]


def test_priority_ranks_those_of_one_standing() -> None:
    retention = Retention(16)
    for block, hold in enumerate([kept(9, priority=1), kept(9), kept(9, priority=-1), None, kept(priority=-1)]):
        retention.add([block], hold)
    retention.add([5], kept(priority=1))
    assert order(retention) == [4, 3, 5, 2, 1, 0]


def test_a_newer_state_of_a_session_supersedes_the_older_one() -> None:
    retention = Retention(16)
    retention.add([3, 2, 1, 0], kept(60, session="s"))
    retention.take([0, 1, 2])  # the next turn goes on behind three blocks
    retention.add([4])
    retention.add([6, 5, 2, 1, 0], kept(60, session="s"))
    assert order(retention) == [3, 4, 6, 5, 2, 1, 0]
    assert retention.evicted.spent == 1


@pytest.mark.parametrize("session", ["other", "s"])
def test_states_that_share_little_stay_beside_each_other(session: str) -> None:
    retention = Retention(16)
    retention.add([3, 2, 1, 0], kept(60, session="s"))
    retention.take([0])
    retention.add([4])
    retention.add([6, 5, 0], kept(60, session=session))
    assert order(retention)[0] == 4
    assert retention.evicted.spent == 0


def test_a_tenant_gives_first_what_it_has_beyond_its_share() -> None:
    retention = Retention(10)
    retention.add([0, 1])
    retention.add([2, 3, 4, 5], kept(60, tenant="a", share=0.2))
    assert retention.evict(3) == [2, 3, 0]
    assert retention.evicted.tenant == 2
    retention.take([4])
    assert sorted(order(retention)) == [1, 5]


@pytest.mark.parametrize("other", [None, kept(60, tenant="b", share=0.1), kept(60)])
def test_what_several_tenants_released_is_no_ones_surplus(other: Hold | None) -> None:
    retention, own = Retention(20), kept(60, tenant="a", share=0.1)
    retention.add([0, 1, 2], other)
    retention.take([0, 1, 2])
    retention.add([0, 1, 2, 3, 4, 5], own)
    retention.add([6], None)
    assert retention.evict(2) == [3, 6]
    assert retention.evicted.tenant == 1
    retention.take([0, 1])
    retention.add([0, 1], own)
    assert retention.evicted.tenant == 1
    assert not retention._over


def test_a_tenant_that_finds_its_own_blocks_again_is_charged_for_them() -> None:
    retention, own = Retention(10), kept(60, tenant="a", share=0.2)
    retention.add([0, 1, 2], own)
    retention.take([0, 1, 2])
    retention.found([0, 1, 2])
    retention.add([0, 1, 2], own)
    retention.add([3])
    assert retention.evict(1) == [0]
    assert retention.evicted.tenant == 1


def test_a_prefix_that_tenants_have_at_once_is_no_ones_surplus() -> None:
    retention = Retention(10)
    pool = BlockPool(num_blocks=10, block_size=1, retention=retention)
    common, a, b = pool.allocate(4), kept(60, tenant="a", share=0.2), kept(60, tenant="b", share=0.2)
    for block in common:
        pool.publish(block, bytes([block]))
    assert pool.match_prefix([bytes([block]) for block in common]) == common
    pool.release(common, a)
    pool.release(common, b)
    assert not retention._over
    pool.allocate(10)
    assert not retention._tenants


@pytest.mark.parametrize(("policy", "expected"), [("lru", [0, 1, 2, 3]), ("lfu", [3, 2, 0, 1]), ("ttl", [1, 2, 3, 0])])
def test_policies_by_name(policy: str, expected: list[int]) -> None:
    retention = Retention(16, POLICIES[policy])
    for block, hits in enumerate([2, 9, 1, 0]):
        for _ in range(hits):
            retention.found([block])
    retention.add([0], kept(60))
    retention.add([1, 2, 3])
    assert order(retention) == expected


def test_wishes_of_evicted_blocks_are_forgotten() -> None:
    retention = Retention(2)
    for _ in range(100):
        retention.add([0, 1], kept(1e6, session="s", tenant="t", share=0.5))
        assert len(retention.evict(2)) == 2
    assert (len(retention._holds), len(retention._shares), len(retention._over)) == (0, 0, 0)
    assert not retention._tenants
    assert len(retention._timed) <= 5


WISHES = st.builds(
    Keep,
    ttl_s=st.sampled_from([0.0, 5.0, 50.0]),
    call_ttl_s=st.sampled_from([0.0, 20.0]),
    session=st.sampled_from(["", "a", "b"]),
    tenant=st.sampled_from(["t", "u"]),
    share=st.sampled_from([1.0, 0.25]),
)


class PoolMachine(RuleBasedStateMachine):
    """A pool whose sequences have wishes: nothing is lost, and who wished to be kept outlasts who didn't."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.retention = Retention(12, clock=self.clock)
        self.pool = BlockPool(num_blocks=12, block_size=1, retention=self.retention)
        self.running: list[tuple[list[int], Hold | None]] = []
        self.begun = 0

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=5), keep=WISHES, priority=st.integers(-1, 1))
    def begin(self, prompt: list[int], keep: Keep, priority: int) -> None:
        digests = [bytes(prompt[:end]) for end in range(1, len(prompt) + 1)]
        found = self.pool.match_prefix(digests)
        lacking = len(digests) - len(found)
        if self.pool.num_free < lacking:
            self.pool.release(found)
            return
        before = set(self.retention)
        standing = {block: self.level(block) for block in before}
        surplus = self.surplus()
        fresh = self.pool.allocate(lacking)
        gone = before & set(fresh)
        if gone and not surplus:
            stayed = [standing[block] for block in before - gone]
            assert max(standing[block] for block in gone) <= min(stayed, default=99)
        for block, digest in zip(fresh, digests[len(found) :], strict=True):
            self.pool.publish(block, digest)
        self.running.append((found + fresh, Hold.of(keep, priority, str(self.begun))))
        self.begun += 1

    @rule(ago=st.integers(1, 5))
    def end_by_a_call(self, ago: int) -> None:
        self.pool.returning.called(str(self.begun - ago))

    def level(self, block: int) -> int:
        level, hold = self.retention._level[block], self.retention._holds.get(block)
        if level > FOUND and hold is not None and hold.until <= self.clock.now:
            return UNUSED  # its time is over: at least before those that are kept
        return min(level, FOUND + 1) if level > FOUND else UNUSED

    def surplus(self) -> bool:
        return bool(self.retention._over)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        blocks, hold = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(blocks, hold)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        held = {*chain(*(blocks for blocks, _ in self.running))}
        idle = list(self.retention)
        assert len(idle) == len(set(idle)) == self.retention.count == self.pool.num_cached
        assert {*idle, *held, *self.pool._free} == set(range(12))
        assert len(idle) + len(held) + len(self.pool._free) == 12

    @invariant()
    def levels_and_shares_are_bounded(self) -> None:
        for level in self.retention._levels[UNUSED + 1 :]:
            assert len(level) <= MAX_SPARED_SHARE * 12
        for share in self.retention._shares.values():
            assert share.count == sum(map(len, share.levels)) > 0
        common = {block for block, tenant in self.retention._tenants.items() if tenant is None}
        for tenant, share in self.retention._shares.items():
            charged = {*chain(*share.levels)}
            assert not charged & common
            assert all(self.retention._tenants[block] == tenant for block in charged)
        assert self.retention._tenants.keys().isdisjoint(self.pool._free)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = examples(60)
