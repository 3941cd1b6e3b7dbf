"""Files of the file tier, real ones, with separate processes that die: all that is found is what was written, or a miss."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.pages import KVLayout
from worker.tier.kv_files import GRACE_S, LOCK, PART, KVFiles, Stored, TornFileError

LAYOUT = KVLayout(num_blocks=9, num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
ROOT = Path(__file__).parents[4]
# Writes for ever, and says so of each file.
WRITER = """
import sys
from pathlib import Path
from tests.unit.worker.tier.test_kv_files import LAYOUT, claimed, written
with claimed(Path(sys.argv[1])) as files:
    for number in range(int(sys.argv[2]), 100_000):
        written(files, number)
        print(number, flush=True)
"""


@contextlib.contextmanager
def claimed(directory: Path, layout: KVLayout = LAYOUT) -> Iterator[KVFiles]:
    files = KVFiles.claim(directory, layout)
    yield files
    files.close()


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int, count: int) -> list[memoryview]:
    return [memoryview(random.Random(number + at).randbytes(LAYOUT.block_bytes)) for at in range(count)]


def written(files: KVFiles, number: int) -> Stored:
    """A file with an entry of one block and one of three."""
    entries = {0: (b"s" * 8, content(number, 1)), 2: (b"t" * 24, content(-number - 9, 3))}
    return files.write(digest_of(number), entries)


def is_found(files: KVFiles, number: int, stored: Stored) -> bool:
    """True if it is as it was written, False if it is a miss."""
    into = {0: buffers(1), 2: buffers(3)}
    try:
        sums = files.read(digest_of(number), stored, into)
    except (OSError, TornFileError):
        return False
    assert sums == {0: b"s" * 8, 2: b"t" * 24}
    assert [*map(bytes, into[0] + into[2])] == [*map(bytes, content(number, 1) + content(-number - 9, 3))]
    return True


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(count)]


def test_what_was_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    with claimed(tmp_path) as files:
        stored = [written(files, number) for number in range(3)]
        into = {2: buffers(3)}
        assert files.read(digest_of(1), stored[1], into) == {2: b"t" * 24}  # one group alone
        assert [*map(bytes, into[2])] == [*map(bytes, content(-10, 3))]
    with claimed(tmp_path, msgspec.structs.replace(LAYOUT, num_blocks=77)) as files:
        assert files.scan() == {digest_of(number): stored[number] for number in range(3)}
        assert all(is_found(files, number, stored[number]) for number in range(3))
        files.remove([(digest_of(1), stored[1]), (digest_of(8), stored[1])])
        assert not is_found(files, 1, stored[1])
        assert files.scan().keys() == {digest_of(0), digest_of(2)}


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    with claimed(tmp_path / "kv") as files:
        written(files, 1)
        for path in [files.folder, *files.folder.rglob("*")]:
            assert path.stat().st_mode & 0o077 == 0


def test_two_processes_have_a_folder_each(tmp_path: Path) -> None:
    with claimed(tmp_path) as one, claimed(tmp_path) as other:
        assert one.folder != other.folder
        written(one, 1)
        assert other.scan() == {}


def test_another_layouts_files_are_removed_unless_somebody_has_them(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("not Baton's")
    larger = msgspec.structs.replace(LAYOUT, head_dim=16)
    with claimed(tmp_path) as files:
        written(files, 1)
        with claimed(tmp_path, larger) as others:
            assert others.scan() == {}
            assert len(files.scan()) == 1
    with claimed(tmp_path, larger):
        pass
    with claimed(tmp_path) as files:
        assert len(files.scan()) == 1  # its model may be down
    aged(tmp_path)
    with claimed(tmp_path, larger), claimed(tmp_path) as files:
        assert files.scan() == {}
    assert mine.read_text() == "not Baton's"


def test_what_fewer_workers_leave_is_removed_after_a_day(tmp_path: Path) -> None:
    with claimed(tmp_path) as one, claimed(tmp_path) as other:
        written(one, 1)
        written(other, 2)
    with claimed(tmp_path), claimed(tmp_path) as files:
        assert len(files.scan()) == 1
    aged(tmp_path)
    with claimed(tmp_path) as one:
        assert len(one.scan()) == 1
        with claimed(tmp_path) as other:
            assert other.scan() == {}


def aged(directory: Path) -> None:
    """Let all that is there have changed two days ago."""
    for path in directory.rglob("*"):
        os.utime(path, (time.time() - 2 * GRACE_S,) * 2)


def test_a_folder_of_others_is_not_taken(tmp_path: Path) -> None:
    with claimed(tmp_path) as files:
        name = files.folder.name
        (files.folder / LOCK).unlink()
        files.folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with claimed(tmp_path) as files:
        assert files.folder.name != name
    assert [*(tmp_path / "elsewhere").iterdir()] == []


@pytest.mark.parametrize("end", [0, 3, 11, 40, LAYOUT.block_bytes, -1])
def test_a_torn_file_is_a_miss(tmp_path: Path, end: int) -> None:
    with claimed(tmp_path) as files:
        stored = written(files, 1)
        (path,) = (path for path in files.folder.glob("*/*"))
        os.truncate(path, end % stored.size)
        assert not is_found(files, 1, stored)
        assert not is_found(files, 1, files.scan()[digest_of(1)])


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_byte_before_the_blocks_is_a_miss_or_shown_by_the_digests(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with claimed(tmp_path) as files:
        stored = written(files, 1)
        (path,) = (path for path in files.folder.glob("*/*"))
        data = bytearray(path.read_bytes())
        data[chance.randrange(stored.size - 4 * LAYOUT.block_bytes)] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        into = {0: buffers(1), 2: buffers(3)}
        with contextlib.suppress(TornFileError, OSError):
            assert files.read(digest_of(1), stored, into) != {0: b"s" * 8, 2: b"t" * 24}


def test_another_blocks_file_is_a_miss(tmp_path: Path) -> None:
    with claimed(tmp_path) as files:
        stored = [written(files, number) for number in range(2)]
        one, other = (files._path(digest_of(number), stored[number].numbers) for number in range(2))
        one.rename(other)
        assert not is_found(files, 1, stored[1])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_no_more_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    left, write = [3], os.write

    def full(descriptor: int, data: memoryview) -> int:
        left[0] -= 1
        if not left[0]:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data[: max(1, len(data) // 2)])

    with claimed(tmp_path) as files:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match=os.strerror(number)):
            written(files, 1)
        left[0] = 0
        assert is_found(files, 2, written(files, 2))  # half by half
        assert files.scan().keys() == {digest_of(2)}


def test_a_process_that_is_killed_while_it_writes_loses_that_file_alone(tmp_path: Path) -> None:
    done = 0
    for seed in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(done)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            for _ in range(random.Random(seed).randrange(1, 12)):
                done = int(process.stdout.readline()) + 1
            process.send_signal(signal.SIGKILL)
            told = process.stdout.read().split()
        done = int(told[-1]) + 1 if told else done
        with claimed(tmp_path) as files:
            found = files.scan()
            assert {digest_of(number) for number in range(done)} <= found.keys()
            assert all(is_found(files, number, found[digest_of(number)]) for number in range(len(found)))
            assert not [path for path in tmp_path.rglob("*") if path.name.endswith(PART)]


def test_a_process_whose_disk_is_full_keeps_what_it_has(tmp_path: Path) -> None:
    limited = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000));"
    command = [sys.executable, "-c", limited + WRITER, str(tmp_path), "0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "File too large" in ended.stderr
    with claimed(tmp_path) as files:
        assert files.scan() == {}
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith(PART)]
