"""Two transports in memory, with real bytes: a one-sided one as `shm` and `cuda_ipc`, and one whose receiver takes part as `ucx`.

A push takes time, and its blocks land one by one in that time, whatever became of the lease meanwhile. Every block that lands
is shown to `landing`, which knows whether it may.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

import numpy as np
import torch

from common.messages import KVLayout, Region
from kvtransfer.digest import lane_digest, lane_view, multipliers
from kvtransfer.transport import Link, TransferError, check_run
from tests.simulation.clock import Process, VirtualLoop
from tests.simulation.weather import Weather

Landing = Callable[["SimTransport", "SimTransport", int, int, int, int], None]


class Fabric:
    """Who can be reached, and what a push does on its way."""

    def __init__(self, loop: VirtualLoop, weather: Weather, faults: Any, landing: Landing) -> None:
        self.loop = loop
        self.weather = weather
        self.faults = faults
        self.landing = landing
        self.nodes: dict[str, SimTransport] = {}
        self.in_flight = 0  # blocks
        self.pushed_at = 0.0  # the newest push that is over, one that was slow from before the calm on, too

    def push_s(self) -> float:
        """How long a push takes."""
        if self.weather.happens(self.weather.slow_push):
            self.faults["slow push"] += 1
            return self.weather.dice.uniform(0.3, 5.0)
        return self.weather.dice.uniform(0.0005, 0.02)


class SimTransport:
    """`Transport` of one process."""

    def __init__(self, fabric: Fabric, process: Process, *, one_sided: bool) -> None:
        self.name = "one-sided" if one_sided else "two-sided"
        self.process = process
        self.one_sided = one_sided
        self.node: Any = None  # the worker's, for `landing`
        self.fabric = fabric
        self.expected: dict[tuple[int, int], tuple[set[int], asyncio.Event]] = {}
        self.lanes: Any = None
        self.factors: Any = None
        self.is_open = True

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    async def open(self, pool: torch.Tensor, layout: KVLayout, incarnation: int) -> Region:
        self.lanes = lane_view(pool)
        self.factors = multipliers(self.lanes.shape[1])
        self.fabric.nodes[f"{self.process.name}@{incarnation}"] = self
        name = f"{self.process.name}@{incarnation}"
        address = {"node": name, "life": name}
        return Region(transport=self.name, incarnation=incarnation, layout=layout, address=address)

    async def connect(self, region: Region) -> Link:
        await asyncio.sleep(0.0002)
        peer = self.fabric.nodes[region.address["node"]]
        if not self.one_sided and not peer.process.alive:
            raise TransferError("the peer is not there")
        return SimLink(self, peer)

    def expect(self, lease_id: int, generation: int, blocks: Sequence[int]) -> None:
        self.expected[lease_id, generation] = (set(blocks), asyncio.Event())
        if not blocks:
            self.expected[lease_id, generation][1].set()

    async def arrived(self, lease_id: int, generation: int, timeout_s: float) -> bool:
        if self.one_sided:
            return True
        if (lease_id, generation) not in self.expected:
            return False
        _, complete = self.expected[lease_id, generation]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await complete.wait()
        return complete.is_set()

    def forget(self, lease_id: int, generation: int) -> None:
        self.expected.pop((lease_id, generation), None)

    def writer_gone(self, writer: Region | None) -> bool:
        if not self.one_sided:
            return True
        if writer is None:
            return False
        node = self.fabric.nodes[writer.address["file"]]
        return not node.process.alive or not node.is_open

    async def close(self) -> None:
        self.is_open = False


class SimLink:
    """`Link` to one peer's pool."""

    bandwidth = 1e10
    closed = False

    def __init__(self, near: SimTransport, far: SimTransport) -> None:
        self._near, self._far = near, far

    async def push(
        self,
        *,
        lease_id: int,
        generation: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
        timeout_s: float,
    ) -> bytes:
        near, far = self._near, self._far
        check_run(source_blocks, destination_blocks, num_source=len(near.lanes), num_destination=len(far.lanes))
        push = _Push(near, far, lease_id, generation)
        try:
            return await (push.one_sided if near.one_sided else push.two_sided)(
                source_blocks, destination_blocks, timeout_s
            )
        finally:
            near.fabric.pushed_at = near.fabric.loop.now

    async def close(self) -> None:
        """Nothing is open."""


class _Push:
    def __init__(self, near: SimTransport, far: SimTransport, lease_id: int, generation: int) -> None:
        self._near, self._far = near, far
        self._lease_id, self._generation = lease_id, generation
        self._fabric = near.fabric

    async def one_sided(self, source: Sequence[int], target: Sequence[int], timeout_s: float) -> bytes:
        """Copied block by block by the writer, in its own time: nothing stops it but its end."""
        weather, whole_s = self._fabric.weather, self._fabric.push_s()
        fails_at = weather.dice.randrange(len(source)) if weather.happens(weather.failed_push) else -1
        digests = np.empty(len(source), dtype="<u8")
        for index, (origin, block) in enumerate(zip(source, target, strict=True)):
            await asyncio.sleep(whole_s / len(source))
            if index == fails_at:
                self._fabric.faults["failed push"] += 1
                raise TransferError("the push failed")
            lanes = self._near.lanes[origin]
            self._write(origin, block, lanes)
            digests[index] = lane_digest(lanes, self._near.factors)
        return digests.tobytes()

    async def two_sided(self, source: Sequence[int], target: Sequence[int], timeout_s: float) -> bytes:
        """Sent with their lease; the receiver takes what it expects at that moment, also after the writer gave up."""
        weather, whole_s = self._fabric.weather, self._fabric.push_s()
        if weather.happens(weather.failed_push) or not self._far.process.alive:
            self._fabric.faults["failed push"] += 1
            await asyncio.sleep(min(timeout_s, whole_s))
            raise TransferError("the peer doesn't answer")
        bytes_sent = [self._near.lanes[origin].copy() for origin in source]
        taken: asyncio.Future[bool] = self._fabric.loop.create_future()
        self._fabric.in_flight += 1
        arguments = (list(source), list(target), bytes_sent, taken)
        self._fabric.loop.call_later(whole_s, self._arrive, *arguments, context=Context())
        try:
            async with asyncio.timeout(timeout_s):
                if not await asyncio.shield(taken):
                    raise TransferError("the receiver dropped the run")
        except TimeoutError as error:
            self._fabric.faults["push timed out"] += 1
            raise TransferError("the push took too long") from error
        digests = np.array([lane_digest(lanes, self._near.factors) for lanes in bytes_sent], dtype="<u8")
        return digests.tobytes()

    def _arrive(self, source: list[int], target: list[int], sent: list[Any], taken: asyncio.Future[bool]) -> None:
        self._fabric.in_flight -= 1
        missing, complete = self._far.expected.get((self._lease_id, self._generation), (set[int](), None))
        is_wanted = self._far.process.alive and missing.issuperset(target)
        if is_wanted and complete is not None:
            for origin, block, lanes in zip(source, target, sent, strict=True):
                self._write(origin, block, lanes, source_is_read=False)
            missing.difference_update(target)
            if not missing:
                complete.set()
        else:
            self._fabric.faults["late run dropped"] += 1
        if not taken.done():
            taken.set_result(is_wanted)

    def _write(self, origin: int, block: int, lanes: Any, *, source_is_read: bool = True) -> None:
        far, weather = self._far, self._fabric.weather
        if far.process.alive:
            self._fabric.landing(
                self._near, far, self._lease_id, self._generation, origin if source_is_read else -1, block
            )
        far.lanes[block] = lanes
        if weather.happens(weather.flipped_bit):
            self._fabric.faults["flipped bit"] += 1
            far.lanes[block, weather.dice.randrange(far.lanes.shape[1])] ^= 1 << weather.dice.randrange(32)
