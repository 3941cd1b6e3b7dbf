"""The file of a shared host tier: slots, their directory and its locks. No policy, no event loop, no tensors.

Whoever dies at any instruction leaves a free slot or a valid copy. A slot's label is cleared before its bytes change, written
once they are complete, and has a check of its own: without a valid label there is nothing, and what a label's digest does not
fit is a miss. Locks are the kernel's, on bytes of the file: the first is held for changes of the directory, one of the others
by each process for as long as it lives, also across containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from kvtransfer.liveness import SHM_FOLDER
from worker.tier.shares import NOBODY

log = logging.getLogger("baton.tier")

MAGIC = b"BatonHR2"
PREFIX = "baton-host"
MOST_PROCESSES = 32
LOCK_S, LOCK_EVERY_S = 1.0, 0.0002
FLOCK = "hhqqi4x"  # C's struct flock
HEAD = struct.Struct("<8sQQ")  # magic, slots, bytes of a slot
COUNTS_AT = 64  # the number of changes, and the newest generation
LABEL, CHECK_BYTES = struct.Struct("<16s8sHHHHQ"), 8
LABEL_BYTES = LABEL.size + CHECK_BYTES
PAGE = 4_096
EMPTY, WRITING, READY = range(3)


@dataclass(frozen=True, slots=True)
class Label:
    """The content of a slot: one of the `size` slots of a group's entry. All of an entry have its generation."""

    digest: bytes
    sum: bytes
    number: int  # the group's
    at: int
    size: int
    writer: int  # the process's number
    generation: int


class Region:
    """A file that processes of a user share for one model and layout. Its arrays change under the lock, if not said otherwise."""

    def __init__(self, path: Path, descriptor: int, member: int) -> None:
        self.path, self.member = path, member
        self._descriptor = descriptor
        self._threads = Lock()  # the kernel tells processes apart alone
        self._key = path.name.encode()[-64:]
        _, self.num_slots, self.block_bytes = HEAD.unpack(os.pread(descriptor, HEAD.size, 0))
        places, num_bytes = _places(self.num_slots, self.block_bytes)
        self.memory = mmap.mmap(descriptor, num_bytes)
        self._labels_at, self.slots_at = places["labels"], places["slots"]
        self.counts = np.frombuffer(self.memory, "<u8", 2, COUNTS_AT)
        self.state = np.frombuffer(self.memory, "u1", self.num_slots, places["state"])
        self.writer = np.frombuffer(self.memory, "u1", self.num_slots, places["writer"])
        self.used = np.frombuffer(self.memory, "<u8", self.num_slots, places["used"])  # without the lock
        # The keys of the tenants that are charged with slots, and their shares: hints, as times of use.
        self.owner = np.frombuffer(self.memory, "<u8", self.num_slots, places["owner"])
        self.share = np.frombuffer(self.memory, "<f8", self.num_slots, places["share"])
        self.ring = np.frombuffer(self.memory, "<u4", self.num_slots, places["ring"])
        # A process writes its own row, without the lock.
        pins = np.frombuffer(self.memory, "<i2", MOST_PROCESSES * self.num_slots, places["pins"])
        self.pins = pins.reshape(MOST_PROCESSES, self.num_slots)

    @classmethod
    def join(cls, tag: str, num_slots: int, block_bytes: int, *, folder: Path = SHM_FOLDER) -> Region:
        """Join the region of this name, or make it; its size is that of who came first. Raises OSError."""
        path = folder / f"{PREFIX}-{os.geteuid()}-{tag}"
        _remove_stale(folder, path)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _check_own(path, descriptor)
                with _locked(descriptor):
                    if os.fstat(descriptor).st_nlink and _is_whole(path, descriptor, num_slots, block_bytes):
                        return cls._joined(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    @classmethod
    def _joined(cls, path: Path, descriptor: int) -> Region:
        member = next((at for at in range(MOST_PROCESSES) if _lock(descriptor, 1 + at, 1)), None)
        if member is None or os.pread(descriptor, len(MAGIC), 0) != MAGIC:
            raise OSError(f"{path} has no room for another worker")
        region = cls(path, descriptor, member)
        region.pins[member] = 0  # a dead process's
        region.reclaim([member])
        return region

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. Raises TimeoutError."""
        if not self._threads.acquire(timeout=LOCK_S):
            raise TimeoutError("another thread has the region")
        try:
            with _locked(self._descriptor):
                yield
        finally:
            self._threads.release()

    def label(self, slot: int) -> Label | None:
        """The valid label of a slot, without the lock; None for others."""
        begin = self._labels_at + slot * LABEL_BYTES
        raw = self.memory[begin : begin + LABEL_BYTES]
        if raw[LABEL.size :] != self._check_of(raw[: LABEL.size]):
            return None
        return Label(*LABEL.unpack_from(raw))

    def clear(self, slot: int, state: int) -> None:
        """Take a slot's content away."""
        begin = self._labels_at + slot * LABEL_BYTES
        self.memory[begin : begin + LABEL_BYTES] = bytes(LABEL_BYTES)
        self.writer[slot], self.owner[slot] = self.member, NOBODY
        self.state[slot] = state
        self._changed(slot)

    def set_label(self, slot: int, label: Label) -> None:
        """Make a written slot known."""
        begin = self._labels_at + slot * LABEL_BYTES
        raw = LABEL.pack(label.digest, label.sum, label.number, label.at, label.size, label.writer, label.generation)
        self.memory[begin : begin + LABEL_BYTES] = raw + self._check_of(raw)
        self.state[slot] = READY
        self._changed(slot)

    def _check_of(self, raw: bytes) -> bytes:
        return hashlib.blake2b(raw, digest_size=CHECK_BYTES, key=self._key).digest()

    def _changed(self, slot: int) -> None:
        count = int(self.counts[0])
        self.ring[count % self.num_slots] = slot
        self.counts[0] = count + 1

    def new_generation(self) -> int:
        self.counts[1] += np.uint64(1)
        return int(self.counts[1])

    def living(self) -> list[int]:
        """Numbers of the processes that live."""
        return [at for at in range(MOST_PROCESSES) if at == self.member or self._is_locked(1 + at)]

    def reclaim(self, dead: list[int]) -> None:
        """Free what dead processes were writing."""
        for slot in np.flatnonzero((self.state == WRITING) & np.isin(self.writer, dead)):
            self.clear(int(slot), EMPTY)

    def reclaim_of_dead(self) -> None:
        self.reclaim([*{*range(MOST_PROCESSES)}.difference(self.living())])

    def reach(self, first: int, count: int) -> memoryview:
        """The bytes of slots, whose memory is there from now on. Raises MemoryError."""
        begin, size = self.slots_at + first * self.block_bytes, count * self.block_bytes
        _reserve(self._descriptor, begin, size)
        return memoryview(self.memory)[begin : begin + size]

    def close(self) -> None:
        """Leave; the last one removes the file."""
        with contextlib.suppress(OSError), self.locked():
            if _lock(self._descriptor, 1, MOST_PROCESSES):
                _remove(self.path)
        _lock(self._descriptor, 0, 1 + MOST_PROCESSES, fcntl.F_UNLCK)  # `mmap` has a copy of the descriptor
        os.close(self._descriptor)

    def _is_locked(self, at: int) -> bool:
        told = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, struct.pack(FLOCK, fcntl.F_WRLCK, 0, at, 1, 0))
        return bool(struct.unpack(FLOCK, told)[0] != fcntl.F_UNLCK)


class Beside:
    """The slots of a further rank: a file beside its worker's region, which lasts as long as that, and has no labels or locks."""

    def __init__(self, region: Path, rank: int, num_slots: int, block_bytes: int) -> None:
        """Join the file, or make it. Raises OSError."""
        self._block_bytes = block_bytes
        path, num_bytes = region.with_name(f"{region.name}.{rank}"), num_slots * block_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _check_own(path, self._descriptor)
            if os.fstat(self._descriptor).st_size < num_bytes:
                os.ftruncate(self._descriptor, num_bytes)
            self._memory = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    def reach(self, first: int, count: int) -> memoryview:
        """See `Region.reach`."""
        begin, size = first * self._block_bytes, count * self._block_bytes
        _reserve(self._descriptor, begin, size)
        return memoryview(self._memory)[begin : begin + size]


def _reserve(descriptor: int, begin: int, size: int) -> None:
    """Take memory for bytes of a file. Raises MemoryError: without, lack of it is a SIGBUS."""
    try:
        os.posix_fallocate(descriptor, begin, size)
    except OSError as error:
        raise MemoryError(f"no room for {size >> 20} MiB in {SHM_FOLDER}: lower --kv-host-mb") from error


def _check_own(path: Path, descriptor: int) -> None:
    told = os.fstat(descriptor)
    if told.st_uid != os.geteuid() or not stat.S_ISREG(told.st_mode):
        raise OSError(f"{path} is not ours")


def _remove(path: Path) -> None:
    """Remove a region, and what further ranks have beside it."""
    for each in (path, *path.parent.glob(f"{path.name}.*")):
        each.unlink(missing_ok=True)


def _is_whole(path: Path, descriptor: int, num_slots: int, block_bytes: int) -> bool:
    """Make the file, if it is empty; False if it was removed, since a dead process left it in parts or with another size."""
    places, num_bytes = _places(num_slots, block_bytes)
    head = HEAD.pack(MAGIC, num_slots, block_bytes)
    if not os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, num_bytes)
        os.posix_fallocate(descriptor, 0, places["slots"])  # else lack of memory is a SIGBUS
        os.pwrite(descriptor, head, 0)
    if os.pread(descriptor, HEAD.size, 0) != head and _lock(descriptor, 1, MOST_PROCESSES):
        _remove(path)
        return False
    return True


def _places(num_slots: int, block_bytes: int) -> tuple[dict[str, int], int]:
    """The places at which arrays begin, and the bytes of the file."""
    at, places = PAGE, dict[str, int]()
    sizes = {"state": 1, "writer": 1, "used": 8, "owner": 8, "share": 8, "ring": 4, "labels": LABEL_BYTES}
    sizes["pins"] = 2 * MOST_PROCESSES
    for name, size in [*sizes.items(), ("slots", block_bytes)]:
        places[name] = at
        at += -(-num_slots * size // PAGE) * PAGE
    return places, at


def _lock(descriptor: int, first: int, count: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Lock bytes of a file for all who have this descriptor; False if others have one of them."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(FLOCK, kind, 0, first, count, 0))
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    until = time.monotonic() + LOCK_S
    while not _lock(descriptor, 0, 1):
        if time.monotonic() > until:
            raise TimeoutError("another worker has the region's lock")
        time.sleep(LOCK_EVERY_S)
    try:
        yield
    finally:
        _lock(descriptor, 0, 1, fcntl.F_UNLCK)


def _remove_stale(folder: Path, own: Path) -> None:
    """Remove this user's other regions that no process has, and ranks' slots without a region."""
    for path in folder.glob(f"{PREFIX}-{os.geteuid()}-*"):
        region = path.with_name(path.name.partition(".")[0])
        if path not in (own, region) and region != own and not region.exists():
            path.unlink(missing_ok=True)
        if path == own or path != region:
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _lock(descriptor, 0, 1 + MOST_PROCESSES) and os.fstat(descriptor).st_nlink:
                    _remove(path)
            finally:
                os.close(descriptor)
