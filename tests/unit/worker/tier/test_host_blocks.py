"""The tier's policy against a plain model of it: no slot is lost or shared, and what is in use stays."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker.tier.host_blocks import HostBlock, HostBlocks
from worker.tier.host_store import PrivateStore, Write

SLOTS = 12
DIGESTS = st.sampled_from([b"%d" % number for number in range(10)])


class Tier(RuleBasedStateMachine):
    """Blocks come, with entries of one to three groups, are used, prove wrong and give way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = HostBlocks(PrivateStore(SLOTS))
        self.reserved: list[Write] = []
        self.used: list[HostBlock] = []
        self.told: set[bytes] = set()

    @rule(digest=DIGESTS, sizes=st.dictionaries(st.integers(0, 2), st.integers(1, 3), min_size=1))
    def reserve(self, digest: bytes, sizes: dict[int, int]) -> None:
        if digest in self.blocks or any(digest == write.digest for write in self.reserved):
            return
        write = self.blocks.reserve(digest, sizes)
        if write is not None:
            assert {number: len(entry) for number, entry in write.slots.items()} == sizes
            self.reserved.append(write)

    @rule(is_written=st.booleans())
    def written(self, is_written: bool) -> None:
        if not self.reserved:
            return
        write = self.reserved.pop(0)
        if is_written:
            write.sums = dict.fromkeys(write.slots, b"")
            self.blocks.add(write)
        else:
            self.blocks.drop(write)

    @rule(digest=DIGESTS)
    def use(self, digest: bytes) -> None:
        block = self.blocks.get(digest)
        if block is not None:
            self.blocks.begin_use(block)
            self.used.append(block)

    @rule()
    def end_use(self) -> None:
        if self.used:
            self.blocks.end_use(self.used.pop())

    @rule(digest=DIGESTS)
    def forget(self, digest: bytes) -> None:
        self.blocks.forget(digest)
        assert digest not in self.blocks

    @rule()
    def listen(self) -> None:
        changed = set(self.blocks.drain_changed())
        assert self.told ^ set(self.blocks) <= changed
        self.told = set(self.blocks)

    @invariant()
    def no_slot_has_two_owners(self) -> None:
        here = [block for digest in self.blocks if (block := self.blocks.get(digest)) is not None]
        owners = {id(block): block.slots for block in [*here, *self.used]}
        taken = [slot for slots in owners.values() for entry in slots.values() for slot in entry]
        taken += [slot for write in self.reserved for entry in write.slots.values() for slot in entry]
        assert len(taken) == len(set(taken)) == self.blocks.num_used


TestTier = Tier.TestCase


def put(blocks: HostBlocks, digest: bytes, sizes: Mapping[int, int] | None = None) -> None:
    sizes = sizes or {0: 1}
    write = blocks.reserve(digest, sizes)
    assert write is not None
    write.sums = dict.fromkeys(sizes, b"")
    blocks.add(write)


def test_what_was_used_longest_ago_gives_way_with_all_of_its_groups() -> None:
    blocks = HostBlocks(PrivateStore(4))
    put(blocks, b"all groups", {0: 1, 1: 2})
    put(blocks, b"other")
    blocks.touch(b"all groups")
    put(blocks, b"new")
    assert list(blocks) == [b"all groups", b"new"]
    put(blocks, b"newer")
    assert list(blocks) == [b"new", b"newer"]
    assert (blocks.evicted, blocks.num_used) == (2, 2)


def test_what_is_larger_than_the_tier_makes_nobody_give_way() -> None:
    blocks = HostBlocks(PrivateStore(2))
    put(blocks, b"here")
    assert blocks.reserve(b"new", {0: 1, 1: 2}) is None
    assert b"here" in blocks


def test_in_a_small_tier_others_give_way_to_what_left_before_or_was_found() -> None:
    blocks = HostBlocks(PrivateStore(2), second_sight=True)
    assert blocks.admits(b"new", was_found=False, num_slots=2)
    put(blocks, b"first")
    assert blocks.admits(b"new", was_found=False)
    assert not blocks.admits(b"new", was_found=False, num_slots=2)
    put(blocks, b"second")
    assert not blocks.admits(b"new", was_found=False)
    assert blocks.admits(b"new", was_found=True)
    blocks.left(b"new")
    assert blocks.admits(b"new", was_found=False)
    for number in range(8):  # it remembers four for a slot
        blocks.left(b"%d" % number)
    assert not blocks.admits(b"new", was_found=False)
