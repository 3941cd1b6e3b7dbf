"""Transport `cuda_ipc`: one kernel writes a run of blocks, or a rank's share of them, straight into a peer's pool on the host.

Bytes take NVLink where the GPUs have it, else PCIe; a slow link is logged as a warning. Writes are one-sided: an aborted
lease's blocks stay in quarantine until the writer answered or its process is gone, which a locked file shows
(`kvtransfer.liveness`). The driver ends a killed process's kernels a moment after its locks are free, hence `GONE_AFTER_S`.

Each worker sees its own GPU alone (CUDA_VISIBLE_DEVICES): mapping needs no visible peer. Containers need a shared IPC and
PID namespace.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from common.messages import KVLayout, Region
from kvtransfer.cuda.driver import CudaDriverError, SharedMemory, close_shared, open_shared, share
from kvtransfer.cuda.mover import MAX_BLOCKS, BlockMover, Flight, mover_of
from kvtransfer.cuda.mover import Move as BlockMove
from kvtransfer.cuda.shares import ShareMove
from kvtransfer.liveness import SHM_FOLDER, create_locked, host, is_locked, is_name, remove_stale, shared_memory
from kvtransfer.shares import Move, Share
from kvtransfer.transport import Link, ShareLink, TransferError, check_moves, check_run, check_whole, plan_to

log = logging.getLogger("baton.cuda_ipc")
Prepared = TypeVar("Prepared", BlockMove, ShareMove)

PREFIX = "baton-ipc"
PROBE_BYTES = 128 << 20
PROBES = 5
SLOW_LINK_BYTES_PER_S = 150e9  # Hopper's NVLink copies at 390e9, PCIe 5 at 55e9
GONE_AFTER_S = 1.0
FORGOTTEN_S = 60.0  # a dead writer is forgotten after this; a later question waits GONE_AFTER_S


class CudaIpcTransport:
    """Shares one pool, and a buffer in which writers measure the link."""

    name = "cuda_ipc"

    def __init__(self) -> None:
        self._pool: torch.Tensor | None = None
        self._layout: KVLayout | None = None
        self._probe: torch.Tensor | None = None
        self._life: tuple[Path, int] | None = None
        # The peer's lock file, a new one for each incarnation -> link. It gets whole blocks, or our share of each.
        self._links: dict[str, CudaIpcLink] = {}
        self._share_links: dict[str, CudaIpcShareLink] = {}
        self._opening = asyncio.Lock()
        self._gone_since: dict[str, float] = {}  # dead writers by the names of their lock files
        remove_stale(PREFIX)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return zeroed memory of `device`. Raises ValueError for a device that is no GPU, MemoryError."""
        if not device.startswith("cuda"):
            raise ValueError(f"transport cuda_ipc moves GPU memory, not {device}'s: use --transport shm")
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no room for the KV pool on {device}: lower --kv-memory-mb ({error})") from error

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        self._pool, self._layout = pool, layout
        self._probe = torch.empty(_probe_blocks(layout) * layout.block_bytes, dtype=torch.uint8, device=pool.device)
        try:
            addresses = (pool.data_ptr(), self._probe.data_ptr())
            mover = mover_of(pool, layout)
            shared, probe = await asyncio.to_thread(mover.on_device, lambda: [*map(share, addresses)])
        except CudaDriverError as error:
            raise ValueError(
                f"transport cuda_ipc: the pool can't be shared ({error}); unset PYTORCH_CUDA_ALLOC_CONF"
            ) from error
        await asyncio.to_thread(mover.digests, [0])  # compiled before the first handoff needs it
        self._life = create_locked(PREFIX)
        address = {
            "host": host(),
            "reach": shared_memory(),
            "file": self._life[0].name,
            "life": self._life[0].name,
            "pool": shared.handle.hex(),
            "pool_offset": str(shared.offset),
            "probe": probe.handle.hex(),
            "probe_offset": str(probe.offset),
        }
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address=address)

    async def connect(self, region: Region) -> Link:
        check_whole(plan_to(region, transport=self.name, layout=self._layout), transport=self.name)
        pool, layout, name = await self._reached(region)
        async with self._opening:
            if name not in self._links:
                self._links[name] = await CudaIpcLink.open(pool, layout, region)
            return self._links[name]

    async def connect_share(self, region: Region, share: Share) -> ShareLink:
        pool, layout, name = await self._reached(region)
        async with self._opening:
            if name not in self._share_links:
                self._share_links[name] = await CudaIpcShareLink.open(pool, layout, region, share)
            return self._share_links[name]

    async def _reached(self, region: Region) -> tuple[torch.Tensor, KVLayout, str]:
        """Return our pool and its layout, and the name of the peer's lock file. Raises TransferError."""
        assert self._pool is not None
        assert self._layout is not None
        if region.address.get("host") != host():
            raise TransferError("the peer runs on another host: give the workers --transport ucx")
        name = region.address.get("file", "")
        if not is_name(name, PREFIX) or not is_locked(SHM_FOLDER / name):
            raise TransferError("the peer is gone, or its /dev/shm is not ours: cuda_ipc needs a shared IPC namespace")
        async with self._opening:
            for links in (self._links, self._share_links):
                for dead in [each for each in links if not is_locked(SHM_FOLDER / each)]:
                    await links.pop(dead).close()
        return self._pool, self._layout, name

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        """No-op: the writer writes by itself."""

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        return True

    def forget(self, lease_id: int, generation: int) -> None:
        """No-op: see `writer_gone`."""

    def writer_gone(self, writer: Region | None) -> bool:
        """True if the writer's process ended long enough ago. Unknown writers (None) may still write."""
        name = writer.address.get("file", "") if writer is not None else ""
        if not is_name(name, PREFIX) or is_locked(SHM_FOLDER / name):
            return False
        now = time.monotonic()
        if name not in self._gone_since:
            self._gone_since = {other: at for other, at in self._gone_since.items() if now - at < FORGOTTEN_S}
            self._gone_since[name] = now
        return now - self._gone_since[name] >= GONE_AFTER_S

    async def close(self) -> None:
        """Wait for writes in flight, then tell peers that none will follow."""
        for links in (self._links, self._share_links):
            for link in links.values():
                await link.close()
            links.clear()
        if self._life is not None:
            self._life[0].unlink(missing_ok=True)
            os.close(self._life[1])
            self._life = None


class _Peer:
    """A peer's mapped pool. At most one launch that writes into it is in flight."""

    def __init__(self, pool: torch.Tensor, layout: KVLayout, region: Region) -> None:
        self.mover = BlockMover(pool, layout)  # used by the event loop alone
        self.num_blocks = region.layout.num_blocks
        self.target = 0
        self.bandwidth = 0.0
        self._shared: SharedMemory | None = None
        self._turn = asyncio.Lock()

    @classmethod
    async def open(
        cls, pool: torch.Tensor, layout: KVLayout, region: Region, prepare: Callable[[BlockMover, int], Prepared]
    ) -> tuple[_Peer, Prepared]:
        """Map the pool, prepare moves into it and measure the link. Raises TransferError."""
        try:
            shared, probe = (
                SharedMemory(bytes.fromhex(region.address[name]), int(region.address[f"{name}_offset"]))
                for name in ("pool", "probe")
            )
            peer = cls(pool, layout, region)
            peer.target = await asyncio.to_thread(peer.mover.on_device, partial(open_shared, shared))
            peer._shared = shared
            move = await asyncio.to_thread(prepare, peer.mover, peer.target)
            peer.bandwidth = await asyncio.to_thread(_measure, peer.mover, region.layout, probe)
        except (CudaDriverError, KeyError, ValueError) as error:
            raise TransferError(f"the peer's pool can't be mapped: {error}") from error
        if peer.bandwidth < SLOW_LINK_BYTES_PER_S:
            log.warning("cuda_ipc.slow_link", extra={"gb_per_s": round(peer.bandwidth / 1e9, 1), "expected": "NVLink"})
        return peer, move

    @property
    def closed(self) -> bool:
        return self._shared is None

    def check_open(self) -> None:
        """Raise TransferError after `close`."""
        if self.closed:
            raise TransferError("the link is closed")

    async def launched(self, flight: Flight, start: Callable[[], None], num_bytes: int) -> bytes:
        """Return the digests of one launch. A cancelled caller still waits for the end: a launched write can't be stopped."""
        async with self._turn:
            try:
                start()
                if not flight.soon(num_bytes / self.bandwidth):
                    waiting = asyncio.ensure_future(flight.done())
                    try:
                        await asyncio.shield(waiting)
                    except asyncio.CancelledError:
                        await asyncio.wait([waiting])
                        raise
                return flight.digests()
            except (RuntimeError, CudaDriverError) as error:
                raise TransferError(f"push failed: {error}") from error

    async def close(self) -> None:
        """Refuse further pushes, wait for the one in flight, unmap."""
        shared, self._shared = self._shared, None
        if shared is not None:
            async with self._turn:
                self.mover.on_device(partial(close_shared, self.target, shared))


class CudaIpcLink:
    """A peer's pool that takes our blocks whole."""

    def __init__(self, peer: _Peer, move: BlockMove) -> None:
        self._peer, self._move = peer, move
        self.bandwidth = peer.bandwidth

    @classmethod
    async def open(cls, pool: torch.Tensor, layout: KVLayout, region: Region) -> CudaIpcLink:
        """Map the peer's pool and measure the link. Raises TransferError."""
        return cls(*await _Peer.open(pool, layout, region, lambda mover, target: mover.move_to(target)))

    @property
    def closed(self) -> bool:
        return self._peer.closed

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        peer, move = self._peer, self._move
        peer.check_open()
        check_run(source_blocks, destination_blocks, num_source=peer.mover.num_blocks, num_destination=peer.num_blocks)
        digests = []
        for first in range(0, len(source_blocks), MAX_BLOCKS):
            part = slice(first, first + MAX_BLOCKS)
            start = partial(move.start, source_blocks[part], destination_blocks[part])
            num_bytes = len(source_blocks[part]) * peer.mover.block_bytes
            digests.append(await peer.launched(move.flight, start, num_bytes))
        return b"".join(digests)

    async def close(self) -> None:
        await self._peer.close()


class CudaIpcShareLink:
    """The pool of a peer's rank, which takes our share of each block."""

    def __init__(self, peer: _Peer, move: ShareMove) -> None:
        self._peer, self._move = peer, move
        self.bandwidth = peer.bandwidth

    @classmethod
    async def open(cls, pool: torch.Tensor, layout: KVLayout, region: Region, share: Share) -> CudaIpcShareLink:
        """Map the peer's pool and measure the link. Raises TransferError."""
        return cls(
            *await _Peer.open(
                pool, layout, region, lambda mover, target: ShareMove(mover, target, region.layout, share)
            )
        )

    @property
    def closed(self) -> bool:
        return self._peer.closed

    async def push_moves(self, *, lease_id: int, generation: int, moves: Sequence[Move], timeout_s: float) -> bytes:
        peer, move = self._peer, self._move
        peer.check_open()
        check_moves(moves, num_source=peer.mover.num_blocks, num_destination=peer.num_blocks)
        return b"".join(
            [
                await peer.launched(move.flight, partial(move.start, some), move.num_bytes(some))
                for some in move.launches(moves)
            ]
        )

    async def close(self) -> None:
        await self._peer.close()


def _measure(mover: BlockMover, layout: KVLayout, probe: SharedMemory) -> float:
    """Push our own first blocks into the peer's probe buffer; bytes/s of the fastest run.

    None fits where ours are much larger than the peer's, which keeps fewer heads: then the link is taken for a slow one.
    """
    room = _probe_blocks(layout) * layout.block_bytes
    blocks = list(range(min(room // mover.block_bytes, MAX_BLOCKS, mover.num_blocks)))
    if not blocks:
        return SLOW_LINK_BYTES_PER_S
    target = mover.on_device(partial(open_shared, probe))
    try:
        move, best = mover.move_to(target), float("inf")
        for _ in range(PROBES):
            started = time.perf_counter()
            mover.on_device(partial(move.start, blocks, range(len(blocks))))
            move.flight.wait()
            best = min(best, time.perf_counter() - started)
    finally:
        mover.on_device(partial(close_shared, target, probe))
    return len(blocks) * mover.block_bytes / best


def _probe_blocks(layout: KVLayout) -> int:
    return min(max(1, PROBE_BYTES // layout.block_bytes), MAX_BLOCKS)
