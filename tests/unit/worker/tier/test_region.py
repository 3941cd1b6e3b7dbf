"""A region of processes that die anywhere: what is found is whole, nothing is leaked, and no one else's is opened."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from worker.tier import region as regions
from worker.tier import shared_store
from worker.tier.host_blocks import HostBlock, HostBlocks
from worker.tier.host_store import Write
from worker.tier.region import EMPTY, WRITING, Region
from worker.tier.shared_store import SharedStore

SLOTS, SLOT_BYTES = 12, 4_096
TRACED = {regions.__file__, shared_store.__file__}


class Process:
    """A process's view of a region. A block has two slots in one group, and one in another."""

    def __init__(self, folder: Path, tag: str = "tag") -> None:
        self.region = Region.join(tag, SLOTS, SLOT_BYTES, folder=folder)
        self.store = SharedStore(self.region)
        self.blocks = HostBlocks(self.store)

    def slot(self, number: int) -> memoryview:
        return self.region.reach(number, 1)

    def store_blocks(self, *names: str, then: Callable[[], object] = lambda: None) -> list[Write]:
        """Write blocks; `then()` is called in the middle of it."""
        writes = [self.blocks.reserve(name.encode().ljust(16), {0: 2, 1: 1}) for name in names]
        assert all(writes)
        kept = [write for write in writes if write is not None]
        with self.store.filling(kept):
            for write in kept:
                for number, entry in write.slots.items():
                    for at, slot in enumerate(entry):
                        content = content_of(write.digest, number, at)
                        self.slot(slot)[: SLOT_BYTES // 2] = content[: SLOT_BYTES // 2]
                        then()
                        self.slot(slot)[SLOT_BYTES // 2 :] = content[SLOT_BYTES // 2 :]
                    write.sums[number] = b"".join(map(sum_of, map(self.slot, entry)))
        for write in kept:
            (self.blocks.add if write.slots else self.blocks.drop)(write)
        return kept

    def found(self) -> dict[str, HostBlock]:
        """The blocks that are known and have the bytes of their sums, which have to be theirs."""
        self.blocks.catch_up()
        found = dict[str, HostBlock]()
        for digest in [*self.blocks]:
            block = self.blocks.get(digest)
            assert block is not None
            fit = [
                (number, entry)
                for number, entry in block.slots.items()
                if b"".join(map(sum_of, map(self.slot, entry))) == block.sums[number]
            ]
            for number, entry in fit:
                for at, slot in enumerate(entry):
                    assert bytes(self.slot(slot)) == content_of(digest, number, at)
            if len(fit) == len(block.slots):
                found[digest.decode().strip()] = block
        return found


@contextmanager
def joined(folder: Path) -> Iterator[Process]:
    process = Process(folder)
    yield process
    process.store.close()


def content_of(digest: bytes, number: int, at: int) -> bytes:
    return blake2b(digest + bytes([number, at])).digest() * (SLOT_BYTES // 64)


def sum_of(view: memoryview) -> bytes:
    return blake2b(view, digest_size=8).digest()


def in_child(what: Callable[[], object]) -> int:
    """Run it in a process of its own; return how that ended, as `waitstatus_to_exitcode` tells."""
    child = os.fork()
    if not child:
        try:
            what()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_at_line(count: int) -> None:
    """Die at the line of the store's code with this number, counted as they run."""
    lines = iter(range(count))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line" and next(lines, None) is None:
            die()
        return trace

    sys.settrace(trace)


def test_another_process_finds_what_one_stored(tmp_path: Path) -> None:
    here = Process(tmp_path)
    assert in_child(lambda: Process(tmp_path).store_blocks("a", "b")) == 0
    assert here.found().keys() == {"a", "b"}
    assert not here.blocks.get(b"a".ljust(16)).is_own  # type: ignore[union-attr]
    assert Process(tmp_path).found().keys() == {"a", "b"}


def test_whoever_is_killed_at_any_line_leaves_free_slots_or_whole_copies(tmp_path: Path) -> None:
    here, deaths = Process(tmp_path), 0
    for number in range(0, 900, 37):

        def stores(number: int = number) -> None:
            if number % 2:  # it may die while it joins, too
                dying_at_line(number // 4)
            process = Process(tmp_path)
            dying_at_line(number)
            process.store_blocks(f"{number}", f"{number} too")

        deaths += in_child(stores) == -signal.SIGKILL
        here.found()
        with joined(tmp_path) as another:
            another.found()
        if number % 3 == 0:
            here.store_blocks(f"here {number}")
            assert f"here {number}" in here.found()
    assert deaths > 5
    full = [f"last {at}" for at in range(SLOTS // 3)]
    here.store_blocks(*full)
    assert here.found().keys() == {*full}  # every slot is there to be had
    assert not (here.region.state == EMPTY).any()


def test_whoever_is_killed_while_bytes_are_copied_leaves_nothing(tmp_path: Path) -> None:
    here = Process(tmp_path)
    here.store_blocks("whole")
    assert in_child(lambda: Process(tmp_path).store_blocks("torn", then=die)) == -signal.SIGKILL
    assert here.found().keys() == {"whole"}
    assert (here.region.state == WRITING).sum() == 3
    here.store_blocks("b", "c", "d")
    assert here.found().keys() == {"whole", "b", "c", "d"}


def test_what_is_used_longest_ago_goes_and_what_is_pinned_by_the_living_stays(tmp_path: Path) -> None:
    here, other = Process(tmp_path), Process(tmp_path)
    here.store_blocks("a", "b", "c", "d")

    def pins_b() -> None:
        process = Process(tmp_path)
        process.blocks.begin_use(process.found()["b"])
        die()

    assert in_child(pins_b) == -signal.SIGKILL
    other.blocks.begin_use(other.found()["a"])
    other.store_blocks("e")
    assert here.found().keys() == other.found().keys() == {"a", "c", "d", "e"}
    other.blocks.end_use(other.found()["a"])
    assert other.store.evicted == 1


def test_a_flipped_bit_of_the_directory_is_a_miss(tmp_path: Path) -> None:
    Process(tmp_path).store_blocks("a")
    other = Process(tmp_path)
    begin = other.region._labels_at
    assert other.region.label(0) is not None
    for at in range(48):
        other.region.memory[begin + at] ^= 1
        assert other.region.label(0) is None
        other.region.memory[begin + at] ^= 1


def test_what_somebody_else_locks_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = Process(tmp_path), Process(tmp_path)
    monkeypatch.setattr(regions, "LOCK_S", 0.01)
    with other.region.locked():
        assert not here.store_blocks("a")[0].slots
    here.store_blocks("a")
    assert other.found().keys() == {"a"}


def test_what_could_not_be_published_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = Process(tmp_path), Process(tmp_path)
    monkeypatch.setattr(regions, "LOCK_S", 0.01)
    held = other.region.locked()
    (write,) = here.store_blocks("a", then=lambda: held.__enter__() if not here.region._is_locked(0) else None)
    held.__exit__(None, None, None)
    assert not write.slots
    here.store.settle()
    assert here.store.num_used == 0


def test_files_are_ours_alone_and_the_last_one_out_removes_them(tmp_path: Path) -> None:
    first, second, other = Process(tmp_path), Process(tmp_path), Process(tmp_path, "other layout")
    first.store_blocks("a")
    assert other.found() == {}
    assert stat.S_IMODE(first.region.path.stat().st_mode) == 0o600
    assert f"-{os.geteuid()}-" in first.region.path.name
    first.store.close()
    assert second.found().keys() == {"a"}
    second.store.close()
    assert [*tmp_path.iterdir()] == [other.region.path]
    assert in_child(lambda: (Process(tmp_path).store_blocks("b"), die())) == -signal.SIGKILL
    assert Process(tmp_path).found().keys() == {"b"}  # a killed worker's are found by the next
    other.store.close()
    assert in_child(lambda: (Process(tmp_path, "third"), die())) == -signal.SIGKILL
    Process(tmp_path, "fourth")
    assert not [*tmp_path.glob("*third")]


def test_who_comes_first_decides_the_size_and_who_is_left_alone_decides_anew(tmp_path: Path) -> None:
    def other_size() -> int:
        return Region.join("tag", 2 * SLOTS, SLOT_BYTES, folder=tmp_path).num_slots

    with joined(tmp_path):
        assert in_child(lambda: os._exit(other_size())) == SLOTS
    assert in_child(lambda: (Process(tmp_path), die())) == -signal.SIGKILL
    assert in_child(lambda: os._exit(other_size())) == 2 * SLOTS
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"torn")
    assert other_size() == 2 * SLOTS


def test_a_name_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / f"{regions.PREFIX}-{os.geteuid()}-tag"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        Process(tmp_path)


def test_a_reader_that_falls_behind_loses_hits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "TOLD_AT_ONCE", 5)
    writes, reads = Process(tmp_path), Process(tmp_path)
    reads.found()
    for number in range(40):
        writes.store_blocks(f"{number}")
    for _ in range(40):
        reads.found()
    assert "39" in reads.found()
