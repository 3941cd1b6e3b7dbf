"""Transport `shm`: pools in POSIX shared memory of one host; the writer copies straight into the reader's pool.

The receiver can't refuse a late write. So an aborted lease's blocks stay in quarantine until the writer answered or its
process is gone, which the lock on its pool's file shows (`kvtransfer.liveness`).
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common.messages import KVLayout, Region
from kvtransfer.digest import factors_of, lane_digest, lane_view
from kvtransfer.host import Lanes, copy_moves
from kvtransfer.liveness import SHM_FOLDER, create_locked, is_locked, is_name, remove_stale, shared_memory
from kvtransfer.plan import Item
from kvtransfer.shares import Move, Piece, Share
from kvtransfer.transport import Link, ShareLink, TransferError, check_moves, check_run, plan_to

PREFIX = "baton-kv"
PROBE_BYTES = 4 << 20


class ShmTransport:
    """Each pool is a locked file of mode 0600 with an unguessable name in /dev/shm.

    Another locked file, empty, shows everybody that the worker lives: its name opens nothing.
    """

    name = "shm"

    def __init__(self) -> None:
        self._pool: torch.Tensor | None = None
        self._layout: KVLayout | None = None
        self._path: Path | None = None
        self._lock = -1  # descriptor; an unlocked file would be removed by the next worker's start
        self._life: tuple[Path, int] | None = None
        # Keys: the file, a new one for each incarnation, and if the link takes shares.
        self._links: dict[tuple[str, bool], ShmLink] = {}
        remove_stale(PREFIX)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return a zeroed tensor in shared memory. Raises ValueError for a device other than the CPU, MemoryError."""
        if device != "cpu":
            raise ValueError(f"transport shm moves host memory, not {device}'s: use --transport cuda_ipc")
        if self._path is not None:
            raise ValueError("this transport has a pool already")
        num_bytes = torch.empty((), dtype=dtype).element_size() * math.prod(shape)
        self._path, self._lock = create_locked(PREFIX)
        try:
            os.posix_fallocate(self._lock, 0, num_bytes)  # out of memory shows now, not as SIGBUS later
            memory = mmap.mmap(self._lock, num_bytes)
        except OSError as error:
            self._unlink()
            raise MemoryError(
                f"no room for {num_bytes >> 20} MiB of KV in {SHM_FOLDER}: lower --kv-memory-mb"
            ) from error
        self._pool = torch.frombuffer(memory, dtype=dtype).reshape(shape)
        return self._pool

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        if self._pool is None or pool.data_ptr() != self._pool.data_ptr() or self._path is None:
            raise ValueError("the pool was not allocated by this transport")
        self._layout = layout
        self._life = create_locked(PREFIX)
        address = {"file": self._path.name, "life": self._life[0].name, "reach": shared_memory()}
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address=address)

    async def connect(self, region: Region) -> Link:
        plan = plan_to(region, transport=self.name, layout=self._layout)
        return await self._connect(region, None if plan.is_whole else Share(((Piece(0, 0, plan.runs),),)))

    async def connect_share(self, region: Region, share: Share) -> ShareLink:
        return await self._connect(region, share)

    async def _connect(self, region: Region, share: Share | None) -> ShmLink:
        assert self._pool is not None
        await self._drop_dead_links()
        key = region.address.get("file", ""), share is not None
        if key not in self._links:
            self._links[key] = ShmLink(self._pool, region, share)
        return self._links[key]

    async def _drop_dead_links(self) -> None:
        """Unmap dead workers' pools, whose memory the kernel otherwise keeps."""
        for key in [key for key in self._links if not (SHM_FOLDER / key[0]).exists()]:
            await self._links.pop(key).close()

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        """No-op: the writer writes by itself."""

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        return True

    def forget(self, lease_id: int, generation: int) -> None:
        """No-op: see `writer_gone`."""

    def writer_gone(self, writer: Region | None) -> bool:
        """True if the writer's process ended or closed its transport. Unknown writers (None) may still write."""
        if writer is None:
            return False
        name = writer.address.get("file", "")
        return is_name(name, PREFIX) and not is_locked(SHM_FOLDER / name)

    async def close(self) -> None:
        """Wait for the copies in flight, then remove the pool: while its file is there, peers expect writes."""
        for link in self._links.values():
            await link.close()
        self._links.clear()
        self._unlink()
        if self._life is not None:
            self._life[0].unlink(missing_ok=True)
            os.close(self._life[1])
            self._life = None
        remove_stale(PREFIX)  # a rank that was killed left its pool

    def _unlink(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._path = None


class ShmLink:
    """The peer's pool mapped into this process. It takes a share of each block where the peer keeps other heads than we do."""

    def __init__(self, pool: torch.Tensor, region: Region, share: Share | None) -> None:
        self._source = lane_view(pool)
        self._destination: Lanes | None = np.frombuffer(_map(region), dtype=self._source.dtype).reshape(
            region.layout.num_blocks, -1
        )
        self._share = share
        self._factors = factors_of(region.layout)
        self._copies: set[asyncio.Future[bytes]] = set()
        self.bandwidth = _measure()

    @property
    def closed(self) -> bool:
        return self._destination is None

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        check_run(source_blocks, destination_blocks, num_source=len(self._source), num_destination=self._num_blocks)
        if self._share is None:
            return await self._copied(partial(self._copy, source_blocks, destination_blocks))
        pairs = zip(source_blocks, destination_blocks, strict=True)
        moves = [Move(Item(0, 0), target, (source,)) for source, target in pairs]
        return await self._copied(partial(self._copy_share, moves))

    async def push_moves(self, *, lease_id: int, generation: int, moves: Sequence[Move], timeout_s: float) -> bytes:
        check_moves(moves, num_source=len(self._source), num_destination=self._num_blocks)
        return await self._copied(partial(self._copy_share, moves))

    @property
    def _num_blocks(self) -> int:
        if self._destination is None:
            raise TransferError("the link is closed")
        return len(self._destination)

    async def _copied(self, work: Callable[[], bytes]) -> bytes:
        copy = asyncio.get_running_loop().run_in_executor(None, work)
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        try:
            return await asyncio.shield(copy)
        except asyncio.CancelledError:
            await asyncio.wait([copy])  # no write may be in flight when push returns
            raise

    def _copy(self, source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> bytes:
        """Copy and digest block by block, so that the digest reads from the CPU's cache."""
        assert self._destination is not None
        digests = np.empty(len(source_blocks), dtype="<u8")
        for index, (source, target) in enumerate(zip(source_blocks, destination_blocks, strict=True)):
            lanes = self._source[source]
            self._destination[target] = lanes
            digests[index] = lane_digest(lanes, self._factors)
        return digests.tobytes()

    def _copy_share(self, moves: Sequence[Move]) -> bytes:
        """Copy our share. Digests cover what was copied."""
        assert self._share is not None
        assert self._destination is not None
        return copy_moves(self._share, moves, self._source, self._destination, self._factors)

    async def close(self) -> None:
        """Refuse further pushes and wait for those in flight; the mapping goes with its last view."""
        self._destination = None
        if self._copies:
            await asyncio.wait(set(self._copies))


def _map(region: Region) -> mmap.mmap:
    name = region.address.get("file", "")
    if not is_name(name, PREFIX):
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


def _measure() -> float:
    """Return the bytes/s of copying private memory, an upper bound for pushes."""
    source, scratch = np.ones(PROBE_BYTES, np.uint8), np.empty(PROBE_BYTES, np.uint8)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        scratch[:] = source
        best = min(best, time.perf_counter() - started)
    return PROBE_BYTES / max(best, 1e-9)
