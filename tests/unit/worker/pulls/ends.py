"""Two workers in one process whose pools reach each other: one has a prompt's blocks, the other asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from common.messages import Ack, Feature, PagePart, PullBlocks, PullReply, StopPull
from engine.sequence import Sequence
from tests.fakes.device import settled
from tests.fakes.pair import running_worker
from tests.fakes.worker import BLOCK, Bench, new_job
from tests.unit.engine.generate import Generator, new_sequence
from worker.device.costs import PromptCost
from worker.pulls.lender import Lender
from worker.pulls.puller import Puller

NUM_BLOCKS = 200
PROMPT = list(range(100, 261))  # 40 full blocks and a token
FULL = len(PROMPT) // BLOCK * BLOCK
KEYS = PagePart(layers=1, planes=2, heads=1, dim=4, dtype="float32")
KEPT = {
    "keys and values": [KEYS],
    "windows": [KEYS, PagePart(layers=2, planes=2, heads=1, dim=4, dtype="float32", window=10)],
    "states": [KEYS, PagePart(layers=2, planes=1, heads=1, dim=8, dtype="float32", per_token=False)],
}
of_each_kind = pytest.mark.parametrize("parts", KEPT.values(), ids=KEPT)
ROOM = {"has_room": lambda: True}
SLOW = PromptCost({64: 64.0, 128: 128.0})  # a second a token: pulling pays


class Ends:
    """The lender `d` and the receiver `p`; `lost` questions get no answer in time, though they arrive."""

    def __init__(self, lender: Bench, receiver: Bench) -> None:
        self.lender, self.receiver = lender, receiver
        self.generators = [Generator(lender.engine), Generator(receiver.engine)]  # type: ignore[arg-type]
        for generator, bench in zip(self.generators, (lender, receiver), strict=True):
            generator.pool = bench.pool
        self.lends = Lender(
            identity=lender.context.identity,
            pool=lender.pool,
            transfers=lender.context.transfers,
            turns=lender.context.cache.turns,
            tier=lender.tier,
        )
        context = receiver.context
        self.puller = Puller(
            pool=receiver.pool,
            layout=context.cache.layout,
            kv=context.cache.kv,
            messenger=context.messenger,
            transfers=context.transfers,
            cost=SLOW,
            spawn=context.background.spawn,
            wake=lambda: None,
        )
        self.lands = True  # what the lender copies from host memory
        self.heard: list[PullBlocks | StopPull] = []
        self.lost: set[type[Any]] = set()
        self.answer: Callable[[PullBlocks | StopPull], Awaitable[PullReply | Ack]] = self.lends.handle
        region = lender.context.transfers.region
        state = lender.state("d")
        receiver.peers.saw(msgspec.structs.replace(state, features=frozenset(Feature), region=region.public))

    async def start(self) -> None:
        await self.receiver.serve("d", self._hear)

    async def _hear(self, message: Any) -> PullReply | Ack | None:
        self.heard.append(message)
        reply = await self.answer(message)
        return None if type(message) in self.lost else reply

    def compute(self, prompt: list[int], *, at: int = 0, max_tokens: int = 1) -> Sequence:
        """Have the lender (or the receiver, 1) compute and cache a prompt and its answer."""
        sequence = new_sequence("computed", prompt, max_tokens=max_tokens)
        self.generators[at].run([sequence])
        return sequence

    def sink(self, prompt: list[int] = PROMPT) -> None:
        """Have the lender compute a prompt, and evict it from its pool to host memory."""
        pool, tier = self.lender.pool, self.lender.tier
        assert tier is not None
        self.compute(prompt)
        held = pool.allocate(pool.num_empty)
        tier.store_ahead()
        self.lender.copier.land()
        held += pool.allocate(pool.num_free)
        pool.release(held)
        assert tier.blocks.num_used
        assert not pool.count_prefix([*tier.blocks])

    def offered(self, prompt: list[int] = PROMPT, *, blocks: int = -1, name: str = "r") -> Sequence:
        """A prompt at the receiver of which the lender is said to have so many blocks, by default all full ones."""
        sequence = new_sequence(name, prompt, max_tokens=4)
        job = new_job(name, prompt, sequence.sampling, prefill=True)
        blocks = (len(prompt) - 1) // BLOCK if blocks < 0 else blocks
        self.puller.offered(sequence, msgspec.structs.replace(job, holder="d", holder_blocks=blocks))
        return sequence

    def is_loading(self, sequence: Sequence) -> bool:
        return self.puller.is_loading(sequence, **ROOM)

    async def pulled(self, sequence: Sequence) -> bool:
        """Wait for its pull; return whether there was one."""
        if not self.is_loading(sequence):
            return False
        while self.is_loading(sequence):
            if self.lands:
                self.lender.copier.land()
            await asyncio.sleep(0.001)
        return True

    async def over(self) -> None:
        """Wait until no write can land any more."""
        while self.puller.table.held_blocks:
            await asyncio.sleep(0.001)
        await settled()

    def answered(self, sequence: Sequence) -> list[int]:
        """The receiver's answer to the prompt, of which `num_cached` tokens were found."""
        self.puller.left(sequence)
        self.generators[1].run([sequence])
        return sequence.token_ids[sequence.num_prompt_tokens :]

    def expected(self, sequence: Sequence) -> list[int]:
        prompt, sampling = sequence.token_ids[: sequence.num_prompt_tokens], sequence.sampling
        return self.receiver.engine.expected(prompt, sampling.max_tokens, sampling)


@asynccontextmanager
async def running_ends(host_slots: int = 0, **options: Any) -> AsyncIterator[Ends]:
    """Both workers, the lender with so much host memory. At the end nobody may hold a block."""
    async with (
        running_worker(NUM_BLOCKS, name="d", max_model_len=400, host_slots=host_slots, **options) as lender,
        running_worker(NUM_BLOCKS, name="p", max_model_len=400, **options) as receiver,
    ):
        ends = Ends(lender, receiver)
        await ends.start()
        yield ends
        await ends.over()
        await ends.lends.close()
        assert (lender.pool.num_used, receiver.pool.num_used) == (0, 0)
