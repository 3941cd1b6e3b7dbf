"""Two workers with one region: each finds what the other stored, with the same text, and no fault changes one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.engine import Engine
from tests.unit.worker.tier.disk_serving import DiskServer
from tests.unit.worker.tier.serving import BLOCK, LENGTH, NUM_PROMPTS, Server
from worker.tier import shared_store
from worker.tier.region import WRITING, Region
from worker.tier.shared_store import SharedStore

ONE = pytest.mark.parametrize("engine", ["grouped heads"], indirect=True)


class SharingServer(Server):
    """A worker with its own pool, whose host memory others have, too."""

    def __init__(self, engine: Engine, folder: Path, *, slots_of_pool: int = 4) -> None:
        num_slots = slots_of_pool * engine.layout.num_blocks
        self.store = SharedStore(Region.join("layout", num_slots, engine.layout.block_bytes, folder=folder))
        super().__init__(engine, slots_of_pool=slots_of_pool, store=self.store)
        self._kv, self._own = engine.kv, engine.kv.clone()

    def answer(self, number: int) -> tuple[list[int], int]:
        """The same, in memory that another worker of this engine left as it was."""
        self._kv.copy_(self._own)
        answer = super().answer(number)
        self._own.copy_(self._kv)
        return answer

    def answers(self) -> list[list[int]]:
        return [self.answer(number)[0] for number in range(NUM_PROMPTS)]


@pytest.mark.quick("windows and states", "latents")
def test_a_worker_finds_what_another_one_stored(engine: Engine, cold: list[list[int]], tmp_path: Path) -> None:
    stores, loads = SharingServer(engine, tmp_path), SharingServer(engine, tmp_path)
    assert stores.answers() == cold
    before = {*stores.tier}
    assert loads.answer(0) == (cold[0], LENGTH // BLOCK * BLOCK)
    assert loads.tier.totals().hit_tokens == LENGTH // BLOCK * BLOCK
    assert {*loads.tier} >= before
    assert {*loads.tier.drain_changed()} >= before  # it announces them as its own
    assert loads.answers() == cold
    assert stores.answers() == cold
    for server in (stores, loads):
        assert server.tier.totals().bad_digests == 0
        assert not server.store.region.pins.any()


@pytest.mark.parametrize("engine", ["grouped heads", "windows and states"], indirect=True)
def test_workers_that_evict_each_others_blocks_answer_the_same(
    engine: Engine, cold: list[list[int]], tmp_path: Path
) -> None:
    servers = [SharingServer(engine, tmp_path, slots_of_pool=1) for _ in range(2)]
    for _ in range(3):
        assert [server.answers() for server in servers] == [cold, cold]
    assert sum(server.tier.totals().evicted_blocks for server in servers)
    assert all(server.tier.totals().used_bytes <= server.tier.totals().capacity_bytes for server in servers)
    assert not servers[0].store.region.pins.any()


@ONE
def test_many_new_blocks_push_nothing_out_as_one_would_not(
    engine: Engine, cold: list[list[int]], tmp_path: Path
) -> None:
    """Slots are claimed when the copy begins: those of the same copy count before, else each would see the same free ones."""
    shared = SharingServer(engine, tmp_path, slots_of_pool=1)
    assert shared.answers() == cold
    assert shared.tier.totals().stored_blocks > 0
    assert shared.tier.totals().evicted_blocks == 0


@ONE
def test_a_flipped_bit_in_shared_memory_is_a_miss(engine: Engine, cold: list[list[int]], tmp_path: Path) -> None:
    stores, loads = SharingServer(engine, tmp_path), SharingServer(engine, tmp_path)
    assert stores.answers() == cold
    stores.flip_a_bit_of_each_slot()
    assert loads.answer(0) == (cold[0], 0)
    assert loads.tier.totals().bad_digests > 0
    assert stores.answers() == cold


@ONE
def test_a_slot_whose_change_nobody_told_is_a_miss_and_no_wrong_content(
    engine: Engine, cold: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its file would be removed, and memory be suspected."""
    stores, loads = SharingServer(engine, tmp_path), SharingServer(engine, tmp_path)
    assert stores.answers() == cold
    loads.tier.blocks.catch_up()
    monkeypatch.setattr(shared_store, "TOLD_AT_ONCE", 0)
    with stores.store.region.locked():
        for slot in range(stores.num_slots):
            stores.store.region.clear(slot, WRITING)
    stores.flip_a_bit_of_each_slot()
    known = len(loads.tier.blocks)
    assert loads.answer(0) == (cold[0], 0)
    assert loads.tier.totals().bad_digests == 0
    assert len(loads.tier.blocks) == known - LENGTH // BLOCK
    assert not loads.store.region.pins.any()


@ONE
def test_a_machine_without_room_for_more_keeps_what_it_has(
    engine: Engine, cold: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory comes in pieces: the second worker's fails, and it stores no more."""
    stores, other = SharingServer(engine, tmp_path), SharingServer(engine, tmp_path)
    assert stores.answers() == cold
    used = stores.store.num_used
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _full)
        assert other.answers() == cold
    assert other.tier.totals().hit_tokens == 0
    assert stores.answers() == other.answers() == cold
    assert stores.tier.totals().hit_tokens > 0
    assert (stores.store.num_used, other.tier.totals().stored_blocks) == (used, 0)
    assert not stores.store.region.pins.any()


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@ONE
def test_what_proved_wrong_in_one_worker_is_found_by_none(
    engine: Engine, cold: list[list[int]], tmp_path: Path
) -> None:
    finds, other = SharingServer(engine, tmp_path), SharingServer(engine, tmp_path)
    assert finds.answers() == cold
    for digest in [*finds.tier]:
        finds.tier.withdrawn(digest)
    finds.settle()
    assert other.answer(0) == (cold[0], 0)
    assert [*other.tier] == [*finds.tier] or other.tier.totals().hit_tokens == 0


@ONE
def test_each_worker_writes_what_it_stored_itself_to_its_files(
    engine: Engine, cold: list[list[int]], tmp_path: Path
) -> None:
    regions = tmp_path / "regions"
    regions.mkdir()

    def store() -> SharedStore:
        return SharedStore(Region.join("layout", engine.layout.num_blocks, engine.layout.block_bytes, folder=regions))

    writes, other = (DiskServer(engine, tmp_path / name, store=store()) for name in ("a", "b"))
    for _ in range(4):
        assert writes.answers() == cold
    assert other.answer(0)[0] == cold[0]
    assert writes.files.totals(BLOCK).hit_tokens > 0
    assert writes.paths()
    assert len(other.paths()) < len(writes.paths())
