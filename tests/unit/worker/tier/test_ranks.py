"""Ranks keep their shares of a block in memory and files of their own, together or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cache.block_pool import BlockPool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.groups import held_at_most
from tests.fakes.copier import HandCopier
from tests.unit.engine import hybrid_windows
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.ranks import engine_of_ranks, threads_of
from tests.unit.worker.tier.serving import BLOCK, LENGTH, MODELS, NUM_PROMPTS, Server, ask
from worker.tier import kv_files
from worker.tier.copier import Copies
from worker.tier.disk import Disk
from worker.tier.file_tier import FileTier
from worker.tier.host_memory import HostMemory
from worker.tier.ranks import share
from worker.tier.ranks.asking import FurtherFiles, FurtherMemory
from worker.tier.ranks.questions import Question, Room, Store
from worker.tier.ranks.share import SharesBelow
from worker.tier.region import PREFIX, Beside, Region
from worker.tier.settings import DiskSettings
from worker.tier.shared_store import SharedStore

AMPLE = 1 << 30


class AskHere:
    """Asks ranks of this process, in the form of the messages."""

    def __init__(self, further: Sequence[SharesBelow]) -> None:
        self.further, self.num_ranks = further, len(further)
        self.largest = 0

    def __call__(self, questions: Sequence[Question]) -> Callable[[], list[bytes]]:
        sent = [*map(msgspec.msgpack.encode, questions)]
        self.largest = max([self.largest, *map(len, sent)])
        return lambda: [b"".join(map(rank.answer, sent)) for rank in self.further]

    def close(self) -> None:
        """No-op: nobody waits."""


class WideServer(Server):
    """A server of several ranks; `directory`: with files, and host memory that is smaller; `regions`: with others' memory."""

    def __init__(
        self, folder: Path, model: str, *, size: int = 2, directory: Path | None = None, regions: Path | None = None
    ) -> None:
        name, settings = MODELS[model]
        case = next(case for case in (*CASES, hybrid_windows.CASE) if case.name == name)
        block = 2 * BLOCK if "states" in model else BLOCK  # every rank has states whole
        config = EngineConfig.of(
            model=case.build(folder), block_size=block, max_model_len=160, num_blocks=400, **settings
        )
        with hybrid_windows.windows() if case is hybrid_windows.CASE else contextlib.nullcontext():
            groups = BlockPool.of(Engine(config).layout)
            count = 2 * (held_at_most(groups.groups, -(-LENGTH // block)) + groups.fixed)
            engine = engine_of_ranks(config.with_pool(count, block), size)
        times = 4 if directory is None else 1
        self.store, room = None, Room(times * engine.layout.num_blocks)
        if regions is not None:
            self.store = SharedStore(Region.join("layout", room.num_slots, engine.layout.block_bytes, folder=regions))
            room = Room(room.num_slots, str(self.store.region.path))
        super().__init__(engine, slots_of_pool=times, store=self.store)
        ranks = enumerate(threads_of(engine).engines, 1)
        self.further = [SharesBelow(each.kv, each.layout, rank) for rank, each in ranks]
        self.ask = AskHere(self.further)
        self.memory._further = FurtherMemory(self.ask, room)
        self.writer, self.reader = HandCopier(), HandCopier()
        if directory is None:
            return
        disk = Disk.claim(DiskSettings(directory, AMPLE), engine.layout, self.ask)
        assert disk is not None
        self.kv_files = disk.files
        writes, reads = Copies(self.writer), Copies(self.reader)
        further = FurtherFiles(self.ask, room)
        self.files = self.tier.files = FileTier(
            self.tier.blocks, self.memory, disk.files, disk.blocks, writes=writes, reads=reads, further=further
        )

    def answer(self, number: int) -> tuple[list[int], int]:
        sequence = ask(number)
        while self.tier.is_loading(sequence, has_room=lambda: True):
            self.reader.land()
            self.copier.land()
        return self._answered(sequence)

    def settle(self) -> None:
        super().settle()
        self.writer.land()

    def memory_of(self, rank: int) -> HostMemory:
        memory = self.further[rank - 1]._memory
        assert memory is not None
        return memory

    def leave(self) -> None:
        """Leave the folders to the next server."""
        self.kv_files.close()
        for each in self.further:
            each._claimed().close()


@pytest.mark.parametrize(
    "model",
    ["grouped heads", *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if name != "grouped heads")],
)
def test_prompts_come_back_from_the_memory_of_all_ranks(model: str, tmp_path: Path) -> None:
    server = WideServer(tmp_path, model)
    first = [server.answer(number) for number in range(NUM_PROMPTS)]
    again = [server.answer(number) for number in range(NUM_PROMPTS)]
    assert [text for text, _ in again] == [text for text, _ in first]
    assert all(found > 0 for _, found in again[: NUM_PROMPTS - 2])
    assert (server.tier.totals().bad_digests, server.tier.totals().failed_copies) == (0, 0)
    assert server.tier.totals().capacity_bytes == 2 * server.num_slots * server.memory.block_bytes


def test_one_ranks_share_that_changed_is_a_miss(tmp_path: Path) -> None:
    server = WideServer(tmp_path, "grouped heads")
    first = [server.answer(number)[0] for number in range(NUM_PROMPTS)]
    for slot in range(server.num_slots):
        server.memory_of(1).slot(slot)[5] ^= 4
    text, found = server.answer(0)
    assert (text, found) == (first[0], 0)
    assert server.tier.totals().bad_digests > 0


def test_ranks_of_another_worker_find_what_was_stored(tmp_path: Path) -> None:
    """Labels of the first rank say it; each reads the memory beside it that ranks of its number have."""
    regions = tmp_path / "regions"
    regions.mkdir()
    stores, loads = (WideServer(tmp_path, "grouped heads", regions=regions) for _ in range(2))
    first = [stores.answer(number)[0] for number in range(NUM_PROMPTS)]
    text, found = loads.answer(0)
    assert (text, found) == (first[0], LENGTH // BLOCK * BLOCK)
    assert [loads.answer(number)[0] for number in range(NUM_PROMPTS)] == first
    assert (loads.tier.totals().bad_digests, loads.tier.totals().failed_copies) == (0, 0)
    for slot in range(stores.num_slots):
        stores.memory_of(1).slot(slot)[5] ^= 4
    text, found = loads.answer(0)
    assert (text, found) == (first[0], 0)
    assert loads.tier.totals().bad_digests > 0
    assert sorted(path.suffix for path in regions.iterdir()) == ["", ".1"]
    for server in (stores, loads):
        assert server.store is not None
        server.store.close()
    assert not [*regions.iterdir()]


def test_what_ranks_have_beside_a_region_goes_with_it(tmp_path: Path) -> None:
    """The next worker removes it where the worker was killed, and leaves that of a region which lives."""
    Beside(tmp_path / f"{PREFIX}-{os.geteuid()}-gone", 1, 4, 4_096)
    region = Region.join("lives", 4, 4_096, folder=tmp_path)
    slots = Beside(region.path, 3, 4, 4_096)
    slots.reach(1, 2)[5] = 7
    other = Region.join("other", 4, 4_096, folder=tmp_path)
    assert {path.name.rpartition("-")[2] for path in tmp_path.iterdir()} == {"lives", "lives.3", "other"}
    assert Beside(region.path, 3, 4, 4_096).reach(1, 2)[5] == 7
    region.close()
    assert [*tmp_path.iterdir()] == [other.path]
    (tmp_path / f"{other.path.name}.1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        Beside(other.path, 1, 4, 4_096)


def test_a_rank_that_fails_to_copy_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = WideServer(tmp_path, "grouped heads")
    first = [server.answer(number)[0] for number in range(NUM_PROMPTS)]

    def fails(question: bytes) -> bytes:
        raise MemoryError("no room")

    monkeypatch.setattr(server.further[0], "answer", fails)
    assert server.answer(0) == (first[0], 0)
    assert server.tier.totals().failed_copies > 0


def test_files_of_all_ranks_bring_prompts_back_also_to_the_next_process(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    server = WideServer(tmp_path / "a", "grouped heads", directory=directory)
    first = [server.answer(number)[0] for _ in range(3) for number in range(NUM_PROMPTS)][:NUM_PROMPTS]
    assert server.files.totals(16).stored_blocks > 0
    assert server.files.totals(16).loaded_blocks > 0
    assert len([*directory.iterdir()]) == 2
    assert server.ask.largest <= 64 << 10
    server.leave()
    after = WideServer(tmp_path / "b", "grouped heads", directory=directory)
    answers = [after.answer(number) for number in range(NUM_PROMPTS)]
    assert [text for text, _ in answers] == first
    assert any(found for _, found in answers)
    assert after.files.totals(16).bad_digests == 0


@pytest.mark.quick("changed")
@pytest.mark.parametrize("fault", ["removed", "cut off", "changed"])
def test_a_file_that_one_rank_lacks_is_a_miss_and_goes_on_all(fault: str, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    server = WideServer(tmp_path / "a", "grouped heads", directory=directory)
    first = [server.answer(number)[0] for _ in range(3) for number in range(NUM_PROMPTS)][:NUM_PROMPTS]
    theirs = server.further[0]._claimed().folder
    for path in theirs.glob("*/*"):
        if fault == "removed":
            path.unlink()
        elif fault == "cut off":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    answers = [server.answer(number) for number in range(NUM_PROMPTS)]
    assert [text for text, _ in answers] == first
    wrong = server.files.totals(16).bad_digests + server.tier.totals().bad_digests
    assert wrong > 0


def test_a_rank_waits_for_its_folder_until_a_killed_workers_rank_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was killed leaves its folder at once, and its ranks theirs later: with others no file would be complete."""
    directory = tmp_path / "kv"
    server = WideServer(tmp_path / "a", "grouped heads", directory=directory)
    first = [server.answer(number)[0] for _ in range(3) for number in range(NUM_PROMPTS)][:NUM_PROMPTS]
    held, theirs = len(server.files.blocks), server.further[0]._claimed()
    claimed, taken = kv_files._claimed, list[Path]()

    def looked(folder: Path) -> tuple[Path, int] | None:
        if (found := claimed(folder)) is None:  # the killed worker's rank is gone before the next look
            taken.append(folder)
            theirs.close()
        return found

    server.kv_files.close()
    monkeypatch.setattr(kv_files, "_claimed", looked)
    after = WideServer(tmp_path / "b", "grouped heads", directory=directory)
    assert taken == [theirs.folder]
    assert after.further[0]._claimed().folder == theirs.folder
    assert len(after.files.blocks) == held > 0
    assert [after.answer(number)[0] for number in range(NUM_PROMPTS)] == first


def test_a_folder_that_is_not_given_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_files, "LEAVE_S", 0.0)
    server = WideServer(tmp_path / "a", "grouped heads", directory=tmp_path / "kv")
    with pytest.raises(OSError, match=r"-1-\w+ is taken by another process"):
        kv_files.KVFiles.claim_beside(server.kv_files.folder, server.further[0]._layout, 1)


def test_what_a_worker_left_long_ago_is_its_ranks_too(tmp_path: Path) -> None:
    """Folders that nobody had for a day are emptied, but none of the worker that begins."""
    directory = tmp_path / "kv"
    server = WideServer(tmp_path / "a", "grouped heads", directory=directory)
    for _ in range(3):
        for number in range(NUM_PROMPTS):
            server.answer(number)
    held = len(server.files.blocks)
    server.leave()
    for path in directory.rglob("*"):
        os.utime(path, (0, 0))
    after = WideServer(tmp_path / "b", "grouped heads", directory=directory)
    assert len(after.files.blocks) == held > 0


def test_two_threads_that_ask_a_rank_first_get_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what one of them stored would be gone."""
    server = WideServer(tmp_path, "grouped heads")
    made, both = list[HostMemory](), threading.Barrier(2, timeout=0.5)

    def new(*said: Any) -> HostMemory:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        made.append(HostMemory(*said))
        return made[-1]

    monkeypatch.setattr(share, "HostMemory", new)
    asked = msgspec.msgpack.encode(Store(Room(4), [0], [0]))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(server.further[0].answer, [asked, asked]))
    assert len(made) == 1


def test_files_that_not_all_ranks_have_go_when_the_next_begins(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    server = WideServer(tmp_path / "a", "grouped heads", directory=directory)
    for _ in range(3):
        for number in range(NUM_PROMPTS):
            server.answer(number)
    ours, theirs = server.kv_files.folder, server.further[0]._claimed().folder
    server.leave()
    some_of_ours, some_of_theirs = sorted(ours.glob("*/*"))[0], sorted(theirs.glob("*/*"))[1]
    some_of_ours.unlink()
    some_of_theirs.unlink()
    after = WideServer(tmp_path / "b", "grouped heads", directory=directory)
    folders = after.kv_files.folder, after.further[0]._claimed().folder
    names = [{path.name for path in folder.glob("*/*")} for folder in folders]
    assert names[0] == names[1] == {digest.hex() + ".1" for digest in after.files.blocks}
    assert some_of_ours.name not in names[0]
    assert some_of_theirs.name not in names[0]


@pytest.mark.parametrize(("slots", "blocks"), [([4], [0]), ([0], [18]), ([-1], [0])])
def test_copies_between_what_is_not_there_are_refused(slots: list[int], blocks: list[int], tmp_path: Path) -> None:
    server = WideServer(tmp_path, "grouped heads")
    with pytest.raises(ValueError, match="aren't there"):
        server.further[0].answer(msgspec.msgpack.encode(Store(Room(4), slots, blocks)))
