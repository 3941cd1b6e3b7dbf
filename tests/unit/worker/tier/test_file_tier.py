"""Files below host memory: a working set larger than both is found again, and no disk changes a text."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.engine import Engine
from tests.unit.worker.tier.disk_serving import DiskServer
from tests.unit.worker.tier.serving import NUM_PROMPTS, ask, of_few_kinds
from worker.tier.disk import Disk
from worker.tier.file_tier import PAUSE_S
from worker.tier.settings import DiskSettings


@dataclass(frozen=True, slots=True)
class Former:
    """The files of a process that has ended."""

    directory: Path
    digests: frozenset[bytes]
    num_bytes: int


@pytest.fixture(scope="module")
def former(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Former:
    server = DiskServer(engine, tmp_path_factory.mktemp("former"))
    server.answers(times=4)
    assert server.paths()
    server.kv_files.close()
    return Former(server.kv_files.folder.parent, frozenset(server.files.blocks), server.files.blocks.num_bytes)


@pytest.fixture
def server(engine: Engine, former: Former, tmp_path: Path) -> DiskServer:
    """A server that found the former process's files."""
    shutil.copytree(former.directory, tmp_path / "kv")
    return DiskServer(engine, tmp_path / "kv")


@pytest.mark.quick("windows and states", "latents")
def test_what_host_memory_gave_up_is_found_in_files(engine: Engine, cold: list[list[int]], tmp_path: Path) -> None:
    server = DiskServer(engine, tmp_path)
    assert server.answers(times=2) == cold
    assert server.tier.file_totals() is not None
    for _ in range(2):
        assert server.answers() == cold
    totals = server.files.totals(16)
    assert totals.hit_tokens > 0
    assert totals.bad_digests == totals.failed_copies == 0
    assert server.tier.totals().bad_digests == 0
    server.check_nothing_is_held()


@of_few_kinds
def test_a_block_that_is_seen_once_is_not_written(engine: Engine, cold: list[list[int]], tmp_path: Path) -> None:
    server = DiskServer(engine, tmp_path)
    assert server.answers() == cold
    assert server.paths() == []


@of_few_kinds
def test_a_new_process_finds_what_a_former_one_wrote(server: DiskServer, former: Former, cold: list[list[int]]) -> None:
    assert {*server.tier} == former.digests
    assert {server.tier.tier_of(digest) for digest in server.tier} == {2}
    assert server.answers() == cold
    assert server.files.totals(16).hit_tokens > 0
    server.check_nothing_is_held()


@pytest.mark.quick
@of_few_kinds
@pytest.mark.parametrize("harm", ["torn", "gone", "one bit", "another's"])
def test_a_file_that_is_not_what_was_written_is_a_miss(
    engine: Engine, cold: list[list[int]], server: DiskServer, harm: str
) -> None:
    chance = random.Random(5)
    paths = server.paths()
    contents = [path.read_bytes() for path in paths]
    for at, path in enumerate(paths):
        data = bytearray(contents[at])
        if harm == "gone":
            path.unlink()
            continue
        if harm == "torn":
            del data[chance.randrange(len(data)) :]
        elif harm == "one bit":
            data[-1 - chance.randrange(engine.layout.block_bytes)] ^= 1 << chance.randrange(8)
        path.write_bytes(contents[at - 1] if harm == "another's" else data)
    for _ in range(2):
        assert server.answers() == cold
    assert server.files.totals(16).bad_digests + server.tier.totals().bad_digests > 0
    server.check_nothing_is_held()


@of_few_kinds
def test_a_full_disk_is_tried_again_later(
    engine: Engine, cold: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = DiskServer(engine, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(server.kv_files, "write", _full)
        assert server.answers(times=4) == cold
        assert server.files.totals(16).failed_copies == 1
    assert server.paths() == []
    server.now += PAUSE_S
    assert server.answers(times=3) == cold
    assert server.paths()
    server.check_nothing_is_held()


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@of_few_kinds
def test_files_never_take_more_than_their_bound(engine: Engine, cold: list[list[int]], tmp_path: Path) -> None:
    server = DiskServer(engine, tmp_path, max_bytes=8 * engine.layout.block_bytes + 8 * 4096)
    for _ in range(4):
        assert server.answers() == cold
        server.writer.land()
        assert sum(path.stat().st_size for path in server.paths()) <= server.files.blocks.max_bytes
    assert server.files.totals(16).evicted_blocks > 0
    server.check_nothing_is_held()


@of_few_kinds
def test_nobody_waits_for_a_disk_that_hangs(server: DiskServer, cold: list[list[int]]) -> None:
    server.answers()  # host memory has blocks, too
    number = next(number for number in range(NUM_PROMPTS) if _begins_to_read(server, number))
    woken = server.woken
    server.reader.delay()
    assert server.woken == woken + 1
    sequence = ask(number)
    while server.tier.is_loading(sequence, has_room=lambda: True):  # host memory alone is asked
        server.copier.land()
    server.tier.left(sequence)
    server.files.write_ahead()
    server.writer.delay()  # its writes hang, too
    for each in range(NUM_PROMPTS):
        assert server.answer(each)[0] == cold[each]
    server.reader.land()
    assert server.answers(times=2) == cold
    server.check_nothing_is_held()


def _begins_to_read(server: DiskServer, number: int) -> bool:
    sequence = ask(number)
    server.tier.is_loading(sequence, has_room=lambda: True)
    begins = bool(server.reader.waiting)
    server.tier.left(sequence)
    server.copier.land()
    return begins


@of_few_kinds
def test_what_proved_wrong_is_in_no_file(server: DiskServer, cold: list[list[int]]) -> None:
    server.answers()  # host memory has blocks, too
    number = next(number for number in range(NUM_PROMPTS) if _begins_to_read(server, number))
    for digest in [*server.files.blocks]:  # while some of them are read
        server.tier.withdrawn(digest)
    server.check_nothing_is_held()
    assert server.paths() == []
    assert server.answer(number)[0] == cold[number]


@of_few_kinds
def test_a_wrong_blocks_file_is_gone_though_the_process_ends_at_once(server: DiskServer, engine: Engine) -> None:
    assert server.paths()
    for digest in [*server.files.blocks]:
        server.files.wrong(digest)
    assert server.writer.waiting  # none of which lands
    server.kv_files.close()
    assert len(DiskServer(engine, server.kv_files.folder.parent).files.blocks) == 0


@of_few_kinds
def test_a_directory_that_cannot_be_used_is_no_disk(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Disk.claim(DiskSettings(tmp_path / "file", 1 << 30), engine.layout) is None


@of_few_kinds
def test_a_disk_finds_no_more_than_it_may_have(engine: Engine, former: Former, tmp_path: Path) -> None:
    shutil.copytree(former.directory, tmp_path / "kv")
    disk = Disk.claim(DiskSettings(tmp_path / "kv", former.num_bytes // 2), engine.layout)
    assert disk is not None
    assert 0 < len(disk.blocks) == len(disk.files.scan()) < len(former.digests)
