"""Tenants' shares of lower tiers: no flood takes what another has below its share, whoever stores and wherever it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Keep
from engine.engine import Engine
from engine.sequence import Hold
from tests.unit.worker.tier.serving import Server, ask
from worker.tier.file_blocks import PAGE, FileBlocks
from worker.tier.host_blocks import HostBlocks
from worker.tier.host_store import HostStore, PrivateStore
from worker.tier.host_tier import SECOND_SIGHT_POOLS
from worker.tier.kv_files import Stored
from worker.tier.region import Region
from worker.tier.shared_store import SharedStore
from worker.tier.shares import NOBODY, Owner

SLOTS = 16
SHARES = {"flood": 0.5, "quiet": 0.25, "other": 0.25}
OWNERS = {name: Owner.of(Keep(tenant=name, share=share)) for name, share in SHARES.items()}
MOST_SIZE = 3


def digest_of(tenant: str, number: int) -> bytes:
    return f"{tenant} {number}".encode().ljust(16)


def put(blocks: HostBlocks, store: HostStore, digest: bytes, size: int, owner: Owner | None) -> bool:
    """Store a block in one slot of the first group, and the others of the next."""
    write = blocks.reserve(digest, {0: 1} | ({1: size - 1} if size > 1 else {}), owner)
    if write is None:
        return False
    with store.filling([write]):
        write.sums = {number: b"8 bytes." * len(entry) for number, entry in write.slots.items()}
    (blocks.add if write.slots else blocks.drop)(write)
    return bool(write.slots)


def held_by_tenants(blocks: HostBlocks) -> Counter[str]:
    blocks.catch_up()
    held = Counter[str]()
    for digest in blocks:
        block = blocks.get(digest)
        assert block is not None
        held[digest.split()[0].decode()] += sum(map(len, block.slots.values()))
    return held


STORED = st.lists(st.tuples(st.sampled_from([*SHARES]), st.integers(0, 12), st.integers(1, MOST_SIZE)), max_size=60)


def check_no_flood_takes_what_is_below_a_share(tiers: list[tuple[HostBlocks, HostStore]], stored: list) -> None:
    for at, (tenant, number, size) in enumerate(stored):
        blocks, store = tiers[at % len(tiers)]
        before, digest = held_by_tenants(blocks), digest_of(tenant, number)
        if digest in blocks:
            blocks.touch(digest)
            continue
        assert put(blocks, store, digest, size, OWNERS[tenant])
        after = held_by_tenants(blocks)
        assert sum(after.values()) == blocks.num_used <= SLOTS
        for each, share in SHARES.items():
            assert after[each] > share * SLOTS - MOST_SIZE or after[each] >= before[each]
    evicted = sum(blocks.evicted for blocks, _ in tiers)
    assert sum(blocks.evicted_surplus for blocks, _ in tiers) == evicted  # all have shares of it


@given(STORED)
def test_no_flood_takes_what_a_tenant_has_below_its_share(stored: list[tuple[str, int, int]]) -> None:
    store = PrivateStore(SLOTS)
    check_no_flood_takes_what_is_below_a_share([(HostBlocks(store), store)], stored)


@given(stored=STORED)
@settings(max_examples=20)
def test_nor_does_one_from_another_worker(
    tmp_path_factory: pytest.TempPathFactory, stored: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("regions")
    stores = [SharedStore(Region.join("tag", SLOTS, 4_096, folder=folder)) for _ in range(2)]
    check_no_flood_takes_what_is_below_a_share([(HostBlocks(store), store) for store in stores], stored)
    for store in stores:
        store.close()


@pytest.fixture(params=["private", "shared"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> HostStore:
    if request.param == "private":
        return PrivateStore(SLOTS)
    return SharedStore(Region.join("tag", SLOTS, 4_096, folder=tmp_path))


def test_who_would_have_too_much_takes_from_nobody(store: HostStore) -> None:
    """Its own blocks are in use, and can't go."""
    blocks = HostBlocks(store)
    for number in range(SLOTS):
        assert put(blocks, store, digest_of("flood" if number < 8 else "quiet", number), 1, OWNERS["flood"])
        block = blocks.get(digest_of("flood", number))
        if block is not None:
            blocks.begin_use(block)
    for number in range(8, SLOTS):
        blocks.released(digest_of("quiet", number), None, was_found=False)  # nobody's now
    assert not put(blocks, store, digest_of("flood", 99), 1, OWNERS["flood"])
    assert put(blocks, store, digest_of("plain", 0), 1, None)
    assert digest_of("quiet", 8) not in blocks
    assert (blocks.evicted, blocks.evicted_surplus) == (1, 0)


def test_what_several_tenants_released_is_nobodys(store: HostStore) -> None:
    blocks = HostBlocks(store)
    for number in range(4):
        put(blocks, store, digest_of("quiet", number), 1, OWNERS["quiet"])
    blocks.released(digest_of("quiet", 0), OWNERS["other"], was_found=False)
    for number in range(SLOTS):
        put(blocks, store, digest_of("quiet", 10 + number), 1, OWNERS["quiet"])
    assert digest_of("quiet", 0) in blocks
    assert digest_of("quiet", 1) not in blocks


def test_a_share_that_changed_holds_from_the_next_use_on(store: HostStore) -> None:
    blocks = HostBlocks(store)
    for number in range(SLOTS):
        put(blocks, store, digest_of("quiet", number), 1, Owner.of(Keep(tenant="quiet", share=0.9)))
    less = Owner.of(Keep(tenant="quiet", share=0.1))
    for number in range(SLOTS):
        blocks.released(digest_of("quiet", number), less, was_found=False)
    for number in range(12):
        assert put(blocks, store, digest_of("plain", number), 1, None)
    assert held_by_tenants(blocks) == {"quiet": 4, "plain": 12}
    assert (blocks.evicted, blocks.evicted_surplus) == (12, 12)


def test_another_worker_knows_whose_a_block_is(tmp_path: Path) -> None:
    first, second = (SharedStore(Region.join("tag", SLOTS, 4_096, folder=tmp_path)) for _ in range(2))
    writes, reads = HostBlocks(first), HostBlocks(second)
    put(writes, first, digest_of("quiet", 0), 3, OWNERS["quiet"])
    reads.catch_up()
    block = reads.get(digest_of("quiet", 0))
    assert block is not None
    assert block.owner == OWNERS["quiet"]
    reads.released(block.digest, OWNERS["quiet"], was_found=True)
    assert (first.region.owner != NOBODY).sum() == 3
    reads.released(block.digest, None, was_found=True)
    assert not (first.region.owner != NOBODY).any()


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -1e300])
def test_hints_that_make_no_sense_stop_nobody(tmp_path: Path, share: float) -> None:
    store = SharedStore(Region.join("tag", SLOTS, 4_096, folder=tmp_path))
    blocks = HostBlocks(store)
    for number in range(3 * SLOTS):
        assert put(blocks, store, digest_of("quiet", number), 1, None)
        store.region.owner[number % SLOTS] = 7 * number
        store.region.share[number % SLOTS] = share
    assert len(blocks) == SLOTS


def files_of(blocks: FileBlocks) -> Counter[str]:
    return Counter(digest.split()[0].decode() for digest in blocks)


@given(st.lists(st.tuples(st.sampled_from([*SHARES]), st.integers(0, 20)), max_size=80))
def test_files_below_a_share_stay(stored: list[tuple[str, int]]) -> None:
    blocks = FileBlocks(SLOTS * PAGE, {})
    for tenant, number in stored:
        before, owner = files_of(blocks), OWNERS[tenant]
        assert owner is not None
        blocks.forget(digest_of(tenant, number))
        for digest, _ in blocks.make_room(PAGE, {owner: PAGE}):
            gone = digest.split()[0].decode()
            assert before[gone] + (gone == tenant) > SHARES[gone] * SLOTS
            before[gone] -= 1
        blocks.add(digest_of(tenant, number), Stored(frozenset([0]), PAGE), owner)
    assert blocks.evicted_surplus == blocks.evicted


def test_files_of_a_former_process_go_after_a_surplus() -> None:
    found = {digest_of("quiet", number): Stored(frozenset([0]), PAGE) for number in range(6)}
    blocks, flood = FileBlocks(SLOTS * PAGE, found), OWNERS["flood"]
    assert flood is not None
    for number in range(40):
        blocks.make_room(PAGE, {flood: PAGE})
        blocks.add(digest_of("flood", number), Stored(frozenset([0]), PAGE), flood)
    assert files_of(blocks) == {"quiet": 6, "flood": 10}


@pytest.mark.parametrize("engine", ["grouped heads"], indirect=True)
def test_a_tenants_prompts_leave_those_of_another_in_host_memory(engine: Engine) -> None:
    server = Server(engine, slots_of_pool=SECOND_SIGHT_POOLS)  # a smaller one takes of no flood

    def answers(number: int, keep: Keep) -> int:
        sequence = ask(number)
        sequence.hold = Hold(keep)
        while server.tier.is_loading(sequence, has_room=lambda: True):
            server.copier.land()
        return server._answered(sequence)[1]

    def quiet() -> int:
        return answers(0, Keep(tenant="quiet", share=0.5))

    quiet()
    for number in range(1, 30):
        answers(number, Keep(tenant="flood", share=0.5))
    totals = server.tier.totals()
    assert 0 < totals.surplus_blocks == totals.evicted_blocks
    assert quiet() > 0
