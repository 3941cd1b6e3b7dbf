"""Transport `local`: a pool that no peer reaches, for a worker that computes its prompts itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.messages import KVLayout, Region
from kvtransfer.shares import Share
from kvtransfer.transport import Link, ShareLink, TransferError


class LocalTransport:
    """A pool that only this worker writes to."""

    name = "local"

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return zeroed memory of `device`. Raises MemoryError."""
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no room for the KV pool on {device}: lower --kv-memory-mb ({error})") from error

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address={})

    async def connect(self, region: Region) -> Link:
        raise TransferError("transport local connects to no peer: give the workers another one")

    async def connect_share(self, region: Region, share: Share) -> ShareLink:
        raise TransferError("transport local connects to no peer: give the workers another one")

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        """No-op: no writer can connect."""

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        return False

    def forget(self, lease_id: int, generation: int) -> None:
        """No-op."""

    def writer_gone(self, writer: Region | None) -> bool:
        return True

    async def close(self) -> None:
        """No-op: the pool goes with the engine."""
