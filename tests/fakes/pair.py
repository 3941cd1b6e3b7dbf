"""Two workers in one process: one computes prompts, and hands them over to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from common.messages import Feature, Reserve, ReserveReply, SamplingParams, ToWorker, WorkerReply
from decode.role import DecodeRole
from kvtransfer.shm import ShmTransport
from kvtransfer.transport import Transfers
from prefill.role import PrefillRole
from tests.fakes.device import settled
from tests.fakes.worker import Bench, claim, new_fake_engine, new_job, running_bench


class Pair:
    """The prefill role of one worker, and the decode role of another as its only candidate; both pools and roles are real."""

    def __init__(
        self, writer: Bench, receiver: Bench, *, heard: Callable[[Reserve], Reserve] = lambda message: message
    ) -> None:
        """`heard`: what the receiver understands of a question for room."""
        self.writer, self.receiver = writer, receiver
        self._heard = heard
        self.prefill = PrefillRole(writer.context, max_requests=4)
        self.decode = DecodeRole(receiver.context)
        writer.roles.attach(self.prefill, active=True)
        receiver.roles.attach(self.decode, active=True)
        receiver.peers.saw(msgspec.structs.replace(writer.state("w"), features=frozenset(Feature)))
        self.replies: list[ReserveReply] = []
        self.pass_s = 0.0  # how long the writer computes a chunk

    async def _handle(self, message: ToWorker) -> WorkerReply | None:
        if not isinstance(message, Reserve):
            return await self.decode.handle(message)
        reply = await self.decode.handle(self._heard(message))
        assert isinstance(reply, ReserveReply)
        self.replies.append(reply)
        return reply

    async def hand_over(self, name: str, prompt: list[int], sampling: SamplingParams) -> None:
        """Compute a prompt and hand it over, until the writer has nothing more to do with it."""
        await self.writer.serve("d0", self._handle)
        await self.receiver.serve("w", self.prefill.handle)
        job = new_job(name, prompt, sampling, prefill=True)
        await self.prefill.start(claim(msgspec.structs.replace(job, decode_workers=["d0"]), self.writer.gateway))
        [serving] = self.prefill.serving.values()
        while chunks := self.prefill.plan(9):
            results = self.writer.engine.launch(chunks).wait()
            await asyncio.sleep(self.pass_s)
            await settled()  # no pass ends before the loop did what was due: room is asked for before the first token
            self.prefill.apply(list(zip(chunks, results, strict=True)))
        await serving

    async def answer(self, name: str, prompt: list[int], sampling: SamplingParams) -> list[int]:
        """Hand a prompt over, and return all tokens that follow it."""
        await self.hand_over(name, prompt, sampling)
        await settled()
        streams = self.receiver.gateway.streams
        streams[name] = list(self.writer.gateway.streams[name])
        while chunks := self.decode.plan(9):
            self.decode.apply(list(zip(chunks, self.receiver.engine.launch(chunks).wait(), strict=True)))
        await settled()
        return streams[name]


@asynccontextmanager
async def running_worker(num_blocks: int = 60, **options: Any) -> AsyncIterator[Bench]:
    """A worker whose pool others write to. `options`: its `name` and `host_slots`, and those of `new_fake_engine`."""
    name, host_slots = options.pop("name", "w"), options.pop("host_slots", 0)
    transport = ShmTransport()
    engine = new_fake_engine(num_blocks, allocate=transport.allocate, **options)
    try:
        async with running_bench(engine, transport=transport, name=name, host_slots=host_slots) as bench:
            region = await transport.open(engine.kv, engine.layout, 1)
            bench.context = replace(bench.context, transfers=Transfers(transport=transport, region=region))
            yield bench
    finally:
        await transport.close()
