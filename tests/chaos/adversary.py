"""A worker that lies: it takes leases like a prefill worker and hands over what is stale, late or has a wrong byte."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
import torch

from common import subjects
from common.blocks import hash_root, pack_tokens, unpack_tokens
from common.bus import NatsBus, NatsSettings, connect_bus
from common.messages import (
    Ack,
    Dial,
    DialReply,
    Handoff,
    HandoffReply,
    Job,
    LeaseAborted,
    Reserve,
    ReserveReply,
    SamplingParams,
    ToWorker,
    WorkerState,
    WriterDone,
    to_worker_decoder,
    worker_reply_decoder,
)
from common.words import WorkerStatus
from engine.cache.pages import pool_dtype, pool_shape
from kvtransfer.transport import Link, open_transport
from tests.chaos.cluster import ChaosCluster
from tests.integration.waiting import eventually
from worker.heartbeat import HEARTBEAT_S

NAME, GATEWAY = "liar", "nobody"
PROMPT = list(range(20, 60))


class Liar:
    """Speaks for itself on the bus. `state` of some decode worker is what it attacks."""

    def __init__(self, bus: NatsBus, cluster: ChaosCluster, target: str) -> None:
        self._bus = bus
        self._target = cluster.peers.states[target]
        self._transport = open_transport("shm")
        self._incarnation = secrets.randbits(63)
        self._layout = msgspec.structs.replace(self._target.region.layout, num_blocks=16)
        self._pool = self._transport.allocate(pool_shape(self._layout), pool_dtype(self._layout), "cpu")
        self._link: Link
        self._beating: asyncio.Task[None]
        self.requests = 0

    async def start(self) -> None:
        """Open the data plane, be heard, and answer aborted leases as an honest worker would."""
        region = await self._transport.open(self._pool, self._layout, self._incarnation)
        state = msgspec.structs.replace(
            self._target,
            worker=NAME,
            incarnation=self._incarnation,
            roles=[],
            status=WorkerStatus.STARTING,
            region=region.public,
            free_blocks=self._layout.num_blocks,
        )
        await self._bus.serve(subjects.peer(NAME, subjects.ANY), to_worker_decoder, self._answer)
        self._beating = asyncio.create_task(self._beat(state))
        dial = Dial(worker=NAME, incarnation=self._incarnation)
        told = await self._bus.request(
            subjects.peer(self._target.worker, NAME), dial, worker_reply_decoder, timeout_s=10.0
        )
        assert isinstance(told, DialReply)
        self._link = await self._transport.connect(told.region)
        self._pool.random_(0, 100)

    async def close(self) -> None:
        """Leave."""
        self._beating.cancel()
        await asyncio.wait([self._beating])
        await self._transport.close()

    async def _beat(self, state: WorkerState) -> None:
        while True:
            await self._bus.publish(subjects.heartbeat(NAME), state)
            await asyncio.sleep(HEARTBEAT_S)

    async def reserve(self, *, remaining_ms: int = 20_000) -> tuple[Job, ReserveReply]:
        """A lease for a fresh request."""
        self.requests += 1
        root = hash_root(model=self._target.model_fingerprint, kv_dtype=self._layout.dtype, block_size=16, salt="liar")
        job = Job(
            request_id=f"lie-{self.requests}", attempt=1, gateway=GATEWAY, token_ids=pack_tokens(PROMPT),
            num_prompt_tokens=len(PROMPT), hash_root=root, sampling=SamplingParams(max_tokens=5),
            decode_workers=[self._target.worker], deadline_ms=remaining_ms,
        )  # fmt: skip
        message = Reserve(
            job=job,
            worker=NAME,
            incarnation=self._incarnation,
            remaining_ms=remaining_ms,
            layout=self._target.region.layout,
        )

        async def granted() -> ReserveReply | None:
            reply = await self._ask(message)
            return reply if isinstance(reply, ReserveReply) and reply.granted else None  # at first it is unknown

        reply = await eventually(granted)
        assert reply is not None
        return job, reply

    async def push(self, lease: ReserveReply) -> bytes:
        """Fill the lease's blocks; the digests of what was written."""
        destination = list(unpack_tokens(lease.destination_blocks))
        return await self._link.push(
            lease_id=lease.lease_id, generation=lease.generation, source_blocks=list(range(len(destination))),
            destination_blocks=destination, timeout_s=5.0,
        )  # fmt: skip

    def flip_a_bit(self) -> None:
        """In the first block of what `push` writes."""
        self._pool.view(torch.uint8).flatten()[
            secrets.randbelow(self._pool[0].numel() * self._pool.element_size())
        ] ^= 1

    async def hand_over(self, job: Job, lease: ReserveReply, digests: bytes, **lies: object) -> HandoffReply:
        """The manifest; `lies` replace its fields."""
        message = Handoff(
            request_id=job.request_id, attempt=1, worker=NAME, incarnation=self._incarnation,
            decode_incarnation=lease.incarnation, lease_id=lease.lease_id, generation=lease.generation, digests=digests,
            first_token=7, remaining_ms=20_000,
        )  # fmt: skip
        reply = await self._ask(msgspec.structs.replace(message, **lies))
        assert isinstance(reply, HandoffReply)
        return reply

    async def give_back(self, job: Job, lease: ReserveReply) -> None:
        """Say that nothing is written any more."""
        await self._ask(self._done(job.request_id, lease.lease_id, lease.generation))

    async def _answer(self, message: ToWorker) -> Ack | None:
        if isinstance(message, LeaseAborted):
            done = self._done(message.request_id, message.lease_id, message.generation)
            await self._bus.publish(subjects.peer(message.worker, NAME), done)
        return None

    def _done(self, request_id: str, lease_id: int, generation: int) -> WriterDone:
        return WriterDone(
            request_id=request_id, attempt=1, worker=NAME, incarnation=self._incarnation, lease_id=lease_id,
            generation=generation,
        )  # fmt: skip

    async def _ask(self, message: msgspec.Struct) -> object:
        return await self._bus.request(
            subjects.peer(self._target.worker, NAME), message, worker_reply_decoder, timeout_s=10.0
        )


@contextlib.asynccontextmanager
async def liar(cluster: ChaosCluster, target: str) -> AsyncIterator[Liar]:
    """A liar on the bus of `cluster`."""
    async with connect_bus(NatsSettings(url=cluster.nats.url), name=NAME) as bus:

        async def heard() -> bool:
            return target in cluster.peers.states

        await eventually(heard)
        one = Liar(bus, cluster, target)
        await one.start()
        try:
            yield one
        finally:
            await one.close()


async def counted(cluster: ChaosCluster, name: str, worker: str, at_least: float, limit_s: float = 5.0) -> float:
    """A worker's counter, once it has come so far; as /metrics shows it after `limit_s` at the latest."""
    end = time.monotonic() + limit_s
    while True:
        metrics = await cluster.metrics()
        value = metrics.get(f'{name}_total{{worker="{worker}"}}', 0.0)
        if value >= at_least or time.monotonic() > end:
            return value
