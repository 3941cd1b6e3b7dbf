"""A reader that follows the journal's changes has the same picture of every tier, however far it falls behind."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.blocks import unpack_tokens
from engine.cache.block_pool import BlockPool
from engine.cache.changes import Chain
from worker.events.journal import Journal
from worker.events.wire import CLEARED

ROOT = b"root"


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Reader:
    """A router's knowledge: names of blocks by tier."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.blocks: set[tuple[str, bytes]] = set()

    def read(self) -> None:
        while self._journal.waiting:
            change = self._journal.waiting.popleft()
            if change.block is None:
                self.blocks.clear()
            elif change.is_here:
                self.blocks.add((change.medium, change.block.digest))
            else:
                self.blocks.remove((change.medium, change.block.digest))


class Tiers(RuleBasedStateMachine):
    """A pool's blocks and those of a tier below come and go; the reader reads now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu, self.cpu = set[bytes](), set[bytes]()
        self.journal = Journal(has=self.gpu.__contains__, plain_root=ROOT, most=4)
        self.host = self.journal.medium("CPU", self.cpu.__contains__)
        self.reader = Reader(self.journal)

    @rule(name=st.binary(min_size=1, max_size=1))
    def computed(self, name: bytes) -> None:
        self.journal.learn(Chain(ROOT, [name], [1], 1), first=0)
        if name not in self.gpu:
            self.gpu.add(name)
            self.journal.came(name)

    @rule(name=st.binary(min_size=1, max_size=1))
    def stored(self, name: bytes) -> None:
        if name in self.gpu and name not in self.cpu:
            self.cpu.add(name)
            self.host.came(name)

    @rule(number=st.integers(0, 255))
    def evicted(self, number: int) -> None:
        if self.gpu:
            name = sorted(self.gpu)[number % len(self.gpu)]
            self.gpu.remove(name)
            self.journal.went(name)

    @rule(number=st.integers(0, 255))
    def evicted_below(self, number: int) -> None:
        if self.cpu:
            name = sorted(self.cpu)[number % len(self.cpu)]
            self.cpu.remove(name)
            self.host.went(name)

    @rule()
    def read(self) -> None:
        self.reader.read()
        assert self.reader.blocks == {("GPU", name) for name in self.gpu} | {("CPU", name) for name in self.cpu}

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert len(self.journal.waiting) <= 4 + 2 * 256 + 1


TestTiers = Tiers.TestCase


def test_a_pool_s_blocks_come_with_their_tokens_and_go_when_others_take_their_place() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    journal = Journal(has=lambda name: pool.has(0, name), plain_root=ROOT, most=100)
    pool.changes.journal = journal
    blocks = pool.allocate(2)
    for number, block in enumerate(blocks):
        chain = Chain(ROOT, [digest(at) for at in range(number + 1)], [0, 0, 1, 1], 2)
        pool.changes.learn(chain, first=number)
        pool.publish(block, digest(number))
    pool.release(blocks)
    pool.release(pool.allocate(1))
    changes = [*journal.waiting]
    assert changes[0] is CLEARED
    told = [(change.block.digest, change.is_here) for change in changes[1:] if change.block is not None]
    assert told == [(digest(0), True), (digest(1), True), (digest(1), False)]
    first, second = (change.block for change in changes[1:3])
    assert first is not None
    assert second is not None
    assert (first.parent, first.extra, unpack_tokens(first.tokens)) == (None, "", [0, 0])
    assert (second.parent, unpack_tokens(second.tokens)) == (digest(0), [1, 1])


def test_a_tenant_s_salt_makes_its_first_block_another_one() -> None:
    journal = Journal(has=lambda _: True, plain_root=ROOT, most=100)
    journal.learn(Chain(b"\xab\xcd", [b"salted", b"second"], [1, 2], 1), first=0)
    for name, parent, extra in ((b"salted", None, "abcd"), (b"second", b"salted", "")):
        journal.came(name)
        block = journal.waiting[-1].block
        assert block is not None
        assert (block.parent, block.extra) == (parent, extra)


def test_what_a_tier_had_before_is_told_once_its_tokens_are_known() -> None:
    journal = Journal(has=lambda _: False, plain_root=ROOT, most=100)
    journal.medium("STORAGE", {b"old"}.__contains__)
    journal.learn(Chain(ROOT, [b"old", b"new"], [1, 2], 1), first=0)
    [_, change] = journal.waiting
    assert change.block is not None
    assert (change.medium, change.block.digest, change.is_here) == ("STORAGE", b"old", True)


def test_blocks_that_never_come_are_forgotten() -> None:
    journal = Journal(has=lambda _: False, plain_root=ROOT, most=100)
    for number in range(10_000):
        journal.learn(Chain(ROOT, [number.to_bytes(4, "big")], [number], 1), first=0)
    assert len(journal._known) < 3_000


def test_pruning_that_finds_nothing_to_forget_is_rare() -> None:
    asked = 0

    def has(_: bytes) -> bool:
        nonlocal asked
        asked += 1
        return True

    journal = Journal(has=has, plain_root=ROOT, most=100)
    for number in range(10_000):
        journal.learn(Chain(ROOT, [number.to_bytes(4, "big")], [number], 1), first=0)
    assert asked < 2 * 10_000
