"""The protocol of transports: make a worker's pool reachable, and push blocks into a peer's pool.

The worker allocates the pool with `allocate`, opens the transport on it, and publishes the returned `Region`. Writers
`connect` to a region and `push`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, runtime_checkable

import torch

from common.messages import KVLayout, Region
from kvtransfer.plan import Plan, pick, plan_copies
from kvtransfer.sender import Run
from kvtransfer.shares import Move, Share
from kvtransfer.transports import TRANSPORTS


class TransferError(Exception):
    """Blocks could not be pushed, or a peer could not be reached. No write of the failed push is in flight."""


def check_run(
    source_blocks: Sequence[int], destination_blocks: Sequence[int], *, num_source: int, num_destination: int
) -> None:
    """Raise TransferError unless the lists pair up and every block is in its pool."""
    if len(source_blocks) != len(destination_blocks):
        raise TransferError(f"{len(source_blocks)} source blocks for {len(destination_blocks)} destinations")
    for blocks, limit, whose in ((source_blocks, num_source, "own"), (destination_blocks, num_destination, "peer's")):
        if blocks and not 0 <= min(blocks) <= max(blocks) < limit:
            raise TransferError(f"a block is outside the {whose} pool of {limit}")


def check_moves(moves: Sequence[Move], *, num_source: int, num_destination: int) -> None:
    """Raise TransferError unless every block of the moves is in its pool."""
    sources = [block for move in moves for block in move.entry]
    for blocks, limit, whose in (
        (sources, num_source, "own"),
        ([move.block for move in moves], num_destination, "peer's"),
    ):
        if blocks and not 0 <= min(blocks) <= max(blocks) < limit:
            raise TransferError(f"a block is outside the {whose} pool of {limit}")


def plan_to(region: Region, *, transport: str, layout: KVLayout | None) -> Plan:
    """Return how blocks of our `layout` move into a peer's pool. Raises TransferError with the reasons against it."""
    if region.transport != transport:
        raise TransferError(f"the peer uses transport {region.transport}, this worker {transport}")
    if layout is None:
        raise TransferError("this transport has no pool")
    try:
        return plan_copies(layout, region.layout)
    except ValueError as error:
        raise TransferError(str(error)) from None


def check_whole(plan: Plan, *, transport: str) -> None:
    """Raise TransferError unless blocks move whole, for a transport that copies nothing smaller."""
    if not plan.is_whole:
        raise TransferError(
            f"the peer's KV layout keeps other heads than ours, and transport {transport} moves whole blocks"
        )


class Link(Protocol):
    """A connection to one peer's pool."""

    bandwidth: float  # bytes/s, measured once at connect

    @property
    def closed(self) -> bool:
        """True once it refuses pushes for good."""
        ...

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        """Copy blocks of our pool into the peer's and return their digests (packed little-endian u64, one a block).

        Returns when the bytes are there and the source may be reused. Raises TransferError with no write in flight.
        """
        ...

    async def close(self) -> None: ...


class ShareLink(Protocol):
    """A connection to the pool of one rank, for our rank's share of its blocks."""

    bandwidth: float

    @property
    def closed(self) -> bool:
        """See `Link.closed`."""
        ...

    async def push_moves(self, *, lease_id: int, generation: int, moves: Sequence[Move], timeout_s: float) -> bytes:
        """Copy our share of the moves' blocks. Otherwise as `Link.push`; digests are those of the share."""
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """One worker's end of the data plane."""

    name: str

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return a zeroed pool that `open` can make reachable."""
        ...

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        """Register `pool` and listen for writers."""
        ...

    async def connect(self, region: Region) -> Link:
        """Return the link to a peer's pool, opened at the first call. Raises TransferError."""
        ...

    async def connect_share(self, region: Region, share: Share) -> ShareLink:
        """Return the link to the pool of a worker's rank, of which we write a share. Raises TransferError."""
        ...

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        """Accept writes under this lease into `blocks` (ours) from now on."""
        ...

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` and return whether all expected blocks were written. One-sided transports return True."""
        ...

    def forget(self, lease_id: int, generation: int) -> None:
        """Accept no more writes under this lease. Two-sided transports drop late writes."""
        ...

    def writer_gone(self, writer: Region | None) -> bool:
        """True if no write of this writer can land after `forget`."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """This worker's end of KV transfers."""

    transport: Transport
    region: Region  # the result of its `open`
    wide: Transport | None = None  # the way to peers of several ranks, where `transport` itself knows none

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, on all ranks together."""
        further = (rank.layout.block_bytes for rank in self.region.ranks if rank.layout is not None)
        return self.region.layout.block_bytes + sum(further)

    async def connect(self, peer: Region) -> Link:
        """Return the link to a peer of any width, see `Transport.connect`."""
        return await self._way_to(peer).connect(peer)

    def writer_gone(self, writer: Region | None) -> bool:
        """True if no write of this writer can land any more, of none of its ranks; see `Transport.writer_gone`."""
        return (self.transport if writer is None else self._way_to(writer)).writer_gone(writer)

    def _way_to(self, peer: Region) -> Transport:
        return self.wide if peer.ranks and self.wide is not None else self.transport


def open_transport(name: str, *, host: str = "127.0.0.1") -> Transport:
    """Return transport `name`. Raises ValueError listing the names, ModuleNotFoundError without its library."""
    kind = {str(known): kind for known, kind in TRANSPORTS.items()}.get(name)
    if kind is None:
        raise ValueError(f"unknown transport {name!r}: choose one of {', '.join(TRANSPORTS)}")
    module, _, implementation = kind.implementation.partition(":")
    new: Callable[..., Transport] = getattr(import_module(module), implementation)
    return new(host=host) if kind.listens_at else new()


@runtime_checkable
class WideLink(Protocol):
    """A connection to all ranks of a peer, for all of ours."""

    async def push_entries(self, *, lease_id: int, generation: int, moves: Sequence[Move], timeout_s: float) -> bytes:
        """Have every rank write its share; return the digests of the blocks, added over all ranks."""
        ...


@runtime_checkable
class AmongRanks(Protocol):
    """A transport of a worker of several ranks, whose pools are digested and announced together."""

    @property
    def num_further(self) -> int:
        """The ranks beside the first."""
        ...

    async def below(self, questions: Sequence[bytes]) -> list[bytes]:
        """Ask every further rank about its tiers; return each one's answers, joined. Raises TransferError."""
        ...

    async def told(self) -> None:
        """Wait until every rank accepts the writes that `expect` named."""
        ...

    async def digests(self, blocks: Sequence[int]) -> bytes:
        """Return the digests of blocks, all ranks' added. Raises TransferError."""
        ...


async def push_run(
    link: Link, run: Run, tables: Sequence[Sequence[tuple[int, ...]]], *, lease: tuple[int, int], timeout_s: float
) -> bytes:
    """Push a sender's run; `tables` are its sequence's entries by group. Raises TransferError."""
    if isinstance(link, WideLink):
        pairs = zip(run.items, run.destination_blocks, strict=True)
        moves = [Move(item, block, tables[item.group][item.entry]) for item, block in pairs]
        return await link.push_entries(lease_id=lease[0], generation=lease[1], moves=moves, timeout_s=timeout_s)
    return await link.push(
        lease_id=lease[0],
        generation=lease[1],
        source_blocks=pick(run.items, tables),
        destination_blocks=run.destination_blocks,
        timeout_s=timeout_s,
    )


async def all_expect(transport: Transport) -> None:
    """Wait until all ranks accept the writes that were announced by `expect`."""
    if isinstance(transport, AmongRanks):
        await transport.told()
