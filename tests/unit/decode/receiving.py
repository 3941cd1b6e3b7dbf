"""A decode worker between other workers and gateways, for tests of what they may ask of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from common.messages import Ack, Cancel, Feature, Job, Reserve, ReserveAgain, ReserveReply
from decode.role import DecodeRole
from kvtransfer.local import LocalTransport
from tests.fakes.worker import Bench, new_fake_engine, running_bench
from worker.identity import Identity
from worker.tier.host_tier import HostTier


class Receiver:
    """A decode worker, and two that may write to it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.role = DecodeRole(bench.context)
        bench.roles.attach(self.role, active=True)
        for writer in ("p0", "p1"):
            bench.peers.saw(msgspec.structs.replace(bench.state(writer), features=frozenset(Feature)))

    @property
    def tier(self) -> HostTier:
        assert self.bench.tier is not None
        return self.bench.tier

    async def reserve(self, job: Job, writer: str = "p0") -> ReserveReply:
        layout = self.bench.context.cache.layout
        return await self._reply(Reserve(job=job, worker=writer, incarnation=1, remaining_ms=60_000, layout=layout))

    async def reserve_again(self, job: Job, writer: str = "p0", *, incarnation: int = 1) -> ReserveReply:
        return await self._reply(ReserveAgain(**Identity(writer, incarnation).head(job), remaining_ms=50_000))

    async def take_back(self, job: Job, writer: str = "p0") -> None:
        await self.role.handle(Cancel(request_id=job.request_id, attempt=job.attempt, worker=writer))

    async def cancel(self, **name: str) -> bool:
        reply = await self.role.handle(Cancel(request_id="r", attempt=1, **name))
        assert isinstance(reply, Ack)
        return reply.known

    async def _reply(self, message: Reserve | ReserveAgain) -> ReserveReply:
        reply = await self.role.handle(message)
        assert isinstance(reply, ReserveReply)
        return reply


@contextlib.asynccontextmanager
async def running_receiver() -> AsyncIterator[Receiver]:
    """One with a pool of 16 blocks."""
    async with running_bench(new_fake_engine(16), transport=LocalTransport()) as bench:
        receiver = Receiver(bench)
        yield receiver
        await receiver.role.close()
