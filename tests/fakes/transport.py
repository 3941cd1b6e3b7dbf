"""A transport whose links lead nowhere, for what happens around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from common.messages import KVLayout, Region
from kvtransfer.transport import TransferError


class IdleLink:
    """A link of a given speed over which nothing is pushed."""

    closed = False

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        raise TransferError("nothing is pushed over this link")

    async def close(self) -> None: ...


class LinkingTransport:
    """Opens links, each half as fast as the one before: 2 GB/s, 1 GB/s, … `on_connect(region)` is called for each."""

    name = "memory"

    def __init__(self, on_connect: Callable[[Region], object]) -> None:
        self._on_connect = on_connect
        self._bandwidth = 4e9

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address={})

    async def connect(self, region: Region) -> IdleLink:
        self._on_connect(region)
        self._bandwidth /= 2
        return IdleLink(self._bandwidth)

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None: ...

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        return False

    def forget(self, lease_id: int, generation: int) -> None: ...

    def writer_gone(self, writer: Region | None) -> bool:
        return True

    async def close(self) -> None: ...
