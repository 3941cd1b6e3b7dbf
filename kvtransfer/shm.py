"""Transport `shm`: pools in POSIX shared memory of one host; the writer copies straight into the reader's pool.

One-sided, as CUDA IPC is: the receiver can't refuse a late write, so an aborted lease's blocks stay in quarantine until the
writer answered or its process is gone (`writer_gone` looks at the pid and its start time).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from common.messages import KVLayout, Region
from kvtransfer.digest import lane_digest, lane_view, multipliers
from kvtransfer.transport import Link, TransferError

SHM_FOLDER = Path("/dev/shm")
PREFIX = "baton-kv"


class ShmTransport:
    """Each pool is a file of mode 0600 with an unguessable name in /dev/shm; files of dead processes are removed at start."""

    name = "shm"

    def __init__(self) -> None:
        self._pool: torch.Tensor | None = None
        self._path: Path | None = None
        self._links: dict[tuple[str, int], ShmLink] = {}
        remove_stale_pools()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return a zeroed tensor in shared memory. Raises ValueError for a device other than the CPU."""
        if device != "cpu":
            raise ValueError(f"transport shm moves host memory; device {device!r} needs another one")
        if self._path is not None:
            raise ValueError("this transport has a pool already")
        num_bytes = torch.empty((), dtype=dtype).element_size() * int(np.prod(shape))
        self._path = SHM_FOLDER / f"{PREFIX}-{os.getpid()}-{secrets.token_hex(16)}"
        descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # fails now, not with SIGBUS later
            memory = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            self._unlink()
            raise MemoryError(
                f"no room for {num_bytes >> 20} MiB of KV in {SHM_FOLDER}: lower --kv-memory-mb"
            ) from error
        finally:
            os.close(descriptor)
        self._pool = torch.frombuffer(memory, dtype=dtype).reshape(shape)
        return self._pool

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        if self._pool is None or pool.data_ptr() != self._pool.data_ptr() or self._path is None:
            raise ValueError("the pool was not allocated by this transport")
        address = {"file": self._path.name, "pid": str(os.getpid()), "started": process_started(os.getpid()) or ""}
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address=address)

    async def connect(self, region: Region) -> Link:
        if region.transport != self.name:
            raise TransferError(f"the peer uses transport {region.transport}, this worker {self.name}")
        if self._pool is None:
            raise TransferError("this transport has no pool")
        key = (region.address.get("file", ""), region.incarnation)
        if key not in self._links:
            self._links[key] = ShmLink(self._pool, region)
        return self._links[key]

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        """Nothing to do: the writer writes by itself."""

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        return True

    def forget(self, lease_id: int, generation: int) -> None:
        """Nothing to do: see `writer_gone`."""

    def writer_gone(self, writer: Region | None) -> bool:
        if writer is None:
            return False
        pid = int(writer.address.get("pid", "0") or 0)
        return process_started(pid) != writer.address.get("started")

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
        self._links.clear()
        self._unlink()

    def _unlink(self) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


class ShmLink:
    """The peer's pool mapped into this process."""

    def __init__(self, pool: torch.Tensor, region: Region) -> None:
        self._source = lane_view(pool)
        self._factors = multipliers(self._source.shape[1])
        self._memory = _map(region)
        self._destination: npt.NDArray[np.unsignedinteger] = np.frombuffer(
            self._memory, dtype=self._source.dtype
        ).reshape(region.layout.num_blocks, -1)
        if self._destination.shape[1] != self._source.shape[1]:
            raise TransferError("the peer's blocks have another size")
        self.bandwidth = _measure(self._source[0])

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        if len(source_blocks) != len(destination_blocks):
            raise TransferError("as many destinations as sources are needed")
        if any(not 0 <= block < len(self._destination) for block in destination_blocks):
            raise TransferError("a destination block is outside the peer's pool")
        copy = asyncio.get_running_loop().run_in_executor(None, self._copy, source_blocks, destination_blocks)
        try:
            return await asyncio.shield(copy)
        except asyncio.CancelledError:
            await asyncio.wait([copy])  # no write may be in flight when push is over
            raise

    def _copy(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> bytes:
        digests = np.empty(len(source_blocks), dtype="<u8")
        for index, (source, destination) in enumerate(zip(source_blocks, destination_blocks, strict=True)):
            lanes = self._source[source]
            self._destination[destination] = lanes
            digests[index] = lane_digest(lanes, self._factors)
        return digests.tobytes()

    async def close(self) -> None:
        """The mapping goes with the last view of it."""


def process_started(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot, which tells it from a later one of the same pid; None: no such."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def remove_stale_pools() -> None:
    """Remove pools of this user whose process is gone: a killed worker can't do it."""
    for path in SHM_FOLDER.glob(f"{PREFIX}-*-*"):
        pid = path.name.removeprefix(f"{PREFIX}-").partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and process_started(int(pid)) is None and path.stat().st_uid == os.getuid():
                path.unlink()


def _map(region: Region) -> mmap.mmap:
    name = region.address.get("file", "")
    if not name.startswith(f"{PREFIX}-") or "/" in name:
        raise TransferError(f"{name!r} is not the name of a pool")
    try:
        descriptor = os.open(SHM_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise TransferError(f"the peer's pool can't be opened: {error.strerror}") from error
    try:
        num_bytes = region.layout.num_blocks * region.layout.block_bytes
        if os.fstat(descriptor).st_size != num_bytes:
            raise TransferError("the peer's pool has another size than it says")
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _measure(block: npt.NDArray[np.unsignedinteger]) -> float:
    """Copy one block's bytes back and forth in private memory: what a copy here can do at best, in bytes/s."""
    scratch = np.empty_like(block)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        scratch[:] = block
        best = min(best, time.perf_counter() - started)
    return float(block.nbytes / max(best, 1e-9))
