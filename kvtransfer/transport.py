"""What a transport does: make a worker's pool reachable, and push blocks into a peer's pool.

The worker introduces engine and transport to each other: it allocates the pool with `allocate`, opens the transport on
it, and publishes the `Region` that comes back. Writers `connect` to a region and `push`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from common.messages import KVLayout, Region


class TransferError(Exception):
    """Blocks could not be pushed, or a peer not be reached. No write of the failed push lands any more."""


def check_run(
    source_blocks: Sequence[int], destination_blocks: Sequence[int], *, num_source: int, num_destination: int
) -> None:
    """Raise TransferError unless the two lists pair up and every block is in its pool: nothing was written then."""
    if len(source_blocks) != len(destination_blocks):
        raise TransferError(f"{len(source_blocks)} source blocks for {len(destination_blocks)} destinations")
    for blocks, limit, whose in ((source_blocks, num_source, "own"), (destination_blocks, num_destination, "peer's")):
        if blocks and not 0 <= min(blocks) <= max(blocks) < limit:
            raise TransferError(f"a block is outside the {whose} pool of {limit}")


class Link(Protocol):
    """A way into one peer's pool."""

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

        Returns when the bytes are there and the source may be reused. Raises TransferError; then no write is in flight
        any more.
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
        """Writes under this lease may land in `blocks` (ours) from now on."""
        ...

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        """Whether all expected blocks were written, after `timeout_s` at most. One-sided ones say True at once."""
        ...

    def forget(self, lease_id: int, generation: int) -> None:
        """No write under this lease is wanted any more. A transport whose receiver takes part drops late ones."""
        ...

    def writer_gone(self, writer: Region | None) -> bool:
        """Whether it is certain that no write of this writer can land after `forget`."""
        ...

    async def close(self) -> None: ...
