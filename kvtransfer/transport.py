"""The protocol of transports: make a worker's pool reachable, and push blocks into a peer's pool.

The worker allocates the pool with `allocate`, opens the transport on it, and publishes the returned `Region`. Writers
`connect` to a region and `push`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

import torch

from common.messages import KVLayout, Region
from kvtransfer.plan import Plan, plan_copies
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


def open_transport(name: str, *, host: str = "127.0.0.1") -> Transport:
    """Return transport `name`. Raises ValueError listing the names, ModuleNotFoundError without its library."""
    kind = {str(known): kind for known, kind in TRANSPORTS.items()}.get(name)
    if kind is None:
        raise ValueError(f"unknown transport {name!r}: choose one of {', '.join(TRANSPORTS)}")
    module, _, implementation = kind.implementation.partition(":")
    new: Callable[..., Transport] = getattr(import_module(module), implementation)
    return new(host=host) if kind.listens_at else new()
