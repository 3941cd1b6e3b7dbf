"""The files of the file tier: one for each block of tokens, with all groups' entries of it. No policy, no event loop.

A file is written under another name and renamed once it is complete. A torn one is found by its length, a changed one by the
digests of its bytes, which are compared on the device. Nothing is synchronised: a crash loses files, which are misses.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.pages import KVLayout

# Time for which a folder that no process has is kept: a model that shares the directory may be down, or a worker restart.
GRACE_S = 86_400.0
LEAVE_S, LOOK_S = 15.0, 0.05  # bound on the end of a killed worker's ranks
MAGIC = b"BatonKV1"
MOST_HEADER_BYTES = 65_536
MOST_WORKERS = 1_024  # share a directory and a layout
PREFIX, PART, LOCK = "baton-kv-", ".part", "lock"
DIGEST_BYTES = 16


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A group's blocks, by the digests of their bytes."""

    number: int
    sums: bytes
    num_blocks: int


class _Header(msgspec.Struct, frozen=True, array_like=True):
    digest: bytes
    block_bytes: int
    entries: tuple[_Entry, ...]  # ordered as their bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A file: the numbers of the groups with an entry in it, and its bytes."""

    numbers: frozenset[int]
    size: int


class TornFileError(Exception):
    """A file is not what was written."""


class KVFiles:
    """Files in a directory that is one process's alone. One thread writes and removes, another may read meanwhile."""

    def __init__(self, folder: Path, lock: int, block_bytes: int) -> None:
        self.folder = folder
        self._lock = lock  # a descriptor
        self._block_bytes = block_bytes

    @classmethod
    def claim(cls, directory: Path, layout: KVLayout) -> KVFiles:
        """Take a folder of `directory` that nobody else has, with what a former worker of this layout left.

        Files in other folders are removed, unless a process has or had them within `GRACE_S`. Raises OSError.
        """
        tag = _tag_of(layout)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = next(filter(None, (_claimed(directory / f"{PREFIX}{tag}-{at}") for at in range(MOST_WORKERS))), None)
        if own is None:
            raise OSError(f"{directory} has no folder left for another worker")
        for other in directory.glob(f"{PREFIX}*"):
            is_ours = other == own[0] or other.name.startswith(f"{own[0].name}-")  # a further rank's beside it
            if not is_ours and other.is_dir() and time.time() - _changed_at(other) > GRACE_S:
                _empty(other)
        os.utime(own[1])
        return cls(*own, layout.block_bytes)

    @classmethod
    def claim_beside(cls, first: Path, layout: KVLayout, rank: int) -> KVFiles:
        """Take the folder of a worker's further rank, whose first rank has that one. Raises OSError.

        Nobody else takes it while the first rank's is ours. A rank of a killed worker may still have it, and leaves within
        seconds: with another folder, none of the worker's files would be complete.
        """
        folder = first.with_name(f"{first.name}-{rank}-{_tag_of(layout)}")
        give_up_at = time.monotonic() + LEAVE_S
        while (own := _claimed(folder)) is None:
            if time.monotonic() > give_up_at:
                raise OSError(f"{folder} is taken by another process")
            time.sleep(LOOK_S)
        os.utime(own[1])
        return cls(*own, layout.block_bytes)

    def scan(self) -> dict[bytes, Stored]:
        """The files that are here, the oldest first. Parts of files are removed."""
        found = list[tuple[float, bytes, Stored]]()
        for path in _files_in(self.folder):
            with contextlib.suppress(ValueError, OSError):
                digest, numbers = _named(path.name)
                told = path.lstat()
                found.append((told.st_mtime, digest, Stored(numbers, told.st_size)))
                continue
            _unlink(path)
        return {digest: stored for _, digest, stored in sorted(found, key=lambda each: each[:2])}

    def write(self, digest: bytes, entries: Mapping[int, tuple[bytes, Sequence[memoryview]]]) -> Stored:
        """Keep blocks with their digests, by group, and no others of this block of tokens. Raises OSError."""
        numbers = sorted(entries)
        header = msgspec.msgpack.encode(
            _Header(digest, self._block_bytes, tuple(_Entry(at, entries[at][0], len(entries[at][1])) for at in numbers))
        )
        parts: list[bytes | memoryview] = [
            MAGIC,
            len(header).to_bytes(4, "little"),
            header,
            *(view for at in numbers for view in entries[at][1]),
        ]
        path, stored = self._path(digest, frozenset(numbers)), Stored(frozenset(numbers), sum(map(len, parts)))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(path.name + PART)
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                for content in parts:
                    view = memoryview(content)
                    while view:
                        view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)
            part.rename(path)
        except OSError:
            _unlink(part)
            raise
        return stored

    def read(self, digest: bytes, stored: Stored, into: Mapping[int, Sequence[memoryview]]) -> dict[int, bytes]:
        """Fill these groups' blocks; return the digests that their bytes had. Raises OSError and TornFileError."""
        descriptor = os.open(self._path(digest, stored.numbers), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            told = os.fstat(descriptor)
            if not stat.S_ISREG(told.st_mode) or told.st_size != stored.size:
                raise TornFileError(f"{told.st_size} bytes of {stored.size}")
            header, offset = _header_of(descriptor, digest)
            sums = dict[int, bytes]()
            for entry in header.entries:
                views = into.get(entry.number, ())
                if views and (len(views) != entry.num_blocks or header.block_bytes != self._block_bytes):
                    raise TornFileError("blocks of another layout")
                for at, view in enumerate(views):
                    _fill(descriptor, view, offset + at * self._block_bytes)
                    sums[entry.number] = entry.sums
                offset += entry.num_blocks * self._block_bytes
        finally:
            os.close(descriptor)
        if sums.keys() != into.keys():
            raise TornFileError("a group's entry is missing")
        return sums

    def remove(self, gone: Iterable[tuple[bytes, Stored]]) -> None:
        """Remove files; absent ones are ignored."""
        for digest, stored in gone:
            _unlink(self._path(digest, stored.numbers))

    def close(self) -> None:
        """Leave the folder to the next process."""
        os.utime(self._lock)
        os.close(self._lock)

    def _path(self, digest: bytes, numbers: frozenset[int]) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / f"{name}.{sum(1 << number for number in numbers):x}"


def _tag_of(layout: KVLayout) -> str:
    """A name of what blocks hold, however many there are."""
    same = msgspec.structs.replace(layout, num_blocks=1)
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=8).hexdigest()


def _claimed(folder: Path) -> tuple[Path, int] | None:
    """A folder and its lock, which goes with the process; None if another has it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return None
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return folder, lock


def _changed_at(folder: Path) -> float:
    """The time when a process last claimed, left or wrote to a folder; never past where it can't be read."""
    try:
        return max(path.lstat().st_mtime for path in [folder, *folder.iterdir()])
    except OSError:
        return math.inf


def _empty(folder: Path) -> None:
    """Remove a folder's files, unless a process has it."""
    if (claimed := _claimed(folder)) is not None:
        for path in _files_in(folder):
            _unlink(path)
        os.close(claimed[1])


def _files_in(folder: Path) -> Iterator[Path]:
    for group in folder.iterdir():
        if group.is_dir() and not group.is_symlink():
            yield from group.iterdir()


def _named(name: str) -> tuple[bytes, frozenset[int]]:
    """Digest and groups in a file's name. Raises ValueError."""
    digest, _, mask = name.partition(".")
    bits = int(mask, 16)
    if len(digest) != 2 * DIGEST_BYTES or bits < 1:
        raise ValueError(name)
    return bytes.fromhex(digest), frozenset(at for at in range(bits.bit_length()) if bits >> at & 1)


def _header_of(descriptor: int, digest: bytes) -> tuple[_Header, int]:
    """The header, and where the blocks begin."""
    first = os.pread(descriptor, MOST_HEADER_BYTES, 0)
    begin = len(MAGIC) + 4
    end = begin + int.from_bytes(first[len(MAGIC) : begin], "little")
    try:
        header = msgspec.msgpack.decode(first[begin:end], type=_Header)
    except msgspec.MsgspecError as error:
        raise TornFileError("no header") from error
    if not first.startswith(MAGIC) or header.digest != digest:
        raise TornFileError("another file's header")
    return header, end


def _fill(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            raise TornFileError("it ends early")
        done += count


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
