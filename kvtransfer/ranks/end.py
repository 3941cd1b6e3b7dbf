"""One rank's end of a worker's transfers: it writes its share into each rank of a peer, and digests its own pool."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import torch

from common.messages import KVLayout, Region
from kvtransfer.digest import block_digests
from kvtransfer.host import added
from kvtransfer.plan import LayoutMismatchError
from kvtransfer.shares import Move, Share, shares
from kvtransfer.transport import Link, ShareLink, TransferError, Transport


class Rank(Protocol):
    """A rank of this worker: this process's, or one that is told by messages. Each call raises TransferError."""

    async def connect(self, peer: int, region: Region) -> float:
        """Open links to the ranks of a peer in which this one has a share; return their bytes/s, added, 0 without one."""
        ...

    async def push(self, peer: int, lease: tuple[int, int], moves: Sequence[Move], timeout_s: float) -> bytes:
        """Write the share; return its digests, one a move, with no write in flight, also after a failure."""
        ...

    async def arrived(self, lease: tuple[int, int], timeout_s: float) -> bool: ...

    async def digests(self, blocks: Sequence[int]) -> bytes: ...


class WholeBlocks:
    """The link to a rank whose blocks are as ours: each moves whole."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.bandwidth = link.bandwidth

    @property
    def closed(self) -> bool:
        return self._link.closed

    async def push_moves(self, *, lease_id: int, generation: int, moves: Sequence[Move], timeout_s: float) -> bytes:
        return await self._link.push(
            lease_id=lease_id,
            generation=generation,
            source_blocks=[move.entry[move.item.number] for move in moves],
            destination_blocks=[move.block for move in moves],
            timeout_s=timeout_s,
        )

    async def close(self) -> None:
        await self._link.close()


class OwnRank:
    """The rank of this process. `layouts` are those of all ranks of the worker."""

    def __init__(self, transport: Transport, pool: torch.Tensor, layouts: Sequence[KVLayout], rank: int) -> None:
        self._transport, self._pool = transport, pool
        self._layouts, self._rank = layouts, rank
        self._peers: dict[int, list[ShareLink]] = {}  # a link to each rank in which we have a share

    @property
    def layout(self) -> KVLayout:
        return self._layouts[self._rank]

    async def connect(self, peer: int, region: Region) -> float:
        targets = region.each
        try:
            ours = [
                shares(self._layouts, target.layout, rank=rank, ranks=len(targets))[self._rank]
                for rank, target in enumerate(targets)
            ]
        except (LayoutMismatchError, ValueError) as error:
            raise TransferError(str(error)) from None
        links = [await self._link(target, share) for target, share in zip(targets, ours, strict=True) if share]
        # Opening links closed those to the dead, which keep memory of the device.
        self._peers = {each: its for each, its in self._peers.items() if not any(link.closed for link in its)}
        self._peers[peer] = links
        return sum(link.bandwidth for link in links)

    async def _link(self, target: Region, share: Share) -> ShareLink:
        if target.transport != self._transport.name:
            raise TransferError(f"the peer uses transport {target.transport}, this worker {self._transport.name}")
        if share.is_whole:
            return WholeBlocks(await self._transport.connect(target))
        return await self._transport.connect_share(target, share)

    async def push(self, peer: int, lease: tuple[int, int], moves: Sequence[Move], timeout_s: float) -> bytes:
        if peer not in self._peers:
            raise TransferError("there is no link to this peer")
        nothing = bytes(8 * len(moves))
        pushes = [
            link.push_moves(lease_id=lease[0], generation=lease[1], moves=moves, timeout_s=timeout_s)
            for link in self._peers[peer]
        ]
        return added([nothing, *await all_ended(pushes)])

    async def arrived(self, lease: tuple[int, int], timeout_s: float) -> bool:
        return await self._transport.arrived(*lease, timeout_s)

    async def digests(self, blocks: Sequence[int]) -> bytes:
        return await asyncio.to_thread(block_digests, self._pool, blocks, self.layout)


async def all_ended(works: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """Return all results once every work ended, or raise the first error then: no write may be in flight."""
    ended = await asyncio.gather(*works, return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one
    return [one for one in ended if isinstance(one, bytes)]
