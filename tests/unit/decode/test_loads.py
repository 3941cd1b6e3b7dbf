"""A question for room waits for what host memory has of its prompt, where that takes less time than to send it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from common.blocks import hash_blocks
from common.messages import ReserveReply, SamplingParams
from common.words import Refusal
from decode import loads
from kvtransfer.local import LocalTransport
from tests.fakes.device import settled
from tests.fakes.worker import BLOCK, new_fake_engine, new_job, running_bench
from tests.unit.decode.receiving import Receiver

POOL, IN_HOST, ON_DEVICE, PROMPT = 16, 5, 2, 8  # blocks
TOKENS = list(range(PROMPT * BLOCK))
JOB = new_job("r", TOKENS, SamplingParams(max_tokens=4), prefill=True)
LATER = msgspec.structs.replace(JOB, attempt=2)
DIGESTS = hash_blocks(JOB.hash_root, TOKENS, BLOCK)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """Its host memory has the first blocks of a prompt, of which its pool has fewer."""
    async with running_bench(new_fake_engine(POOL), transport=LocalTransport(), host_slots=4 * POOL) as bench:
        receiver, pool = Receiver(bench), bench.pool
        other = new_job("other", [1, 2], SamplingParams(max_tokens=4), prefill=True)
        assert (await receiver.reserve(other)).granted  # from now on it stores what it evicts
        await receiver.take_back(other)
        keep(receiver, IN_HOST)
        held = pool.allocate(pool.num_empty)
        bench.context.cache.elsewhere.store_ahead()
        bench.copier.land()
        held += pool.allocate(pool.num_free)
        pool.release(held)
        assert len(receiver.tier.blocks) == IN_HOST
        keep(receiver, ON_DEVICE)
        yield receiver
        await receiver.role.close()
        assert pool.num_used == len(receiver.tier.held) == 0


def keep(receiver: Receiver, count: int) -> None:
    """Have the pool cache the first blocks of the prompt."""
    pool = receiver.bench.pool
    blocks = pool.allocate(count)
    for block, digest in zip(blocks, DIGESTS, strict=False):
        pool.publish(block, digest)
    pool.release(blocks)


async def asked(receiver: Receiver) -> asyncio.Task[ReserveReply]:
    question = asyncio.create_task(receiver.reserve(JOB))
    await settled()
    return question


async def check_lease(receiver: Receiver, lease: ReserveReply, *, has: int) -> None:
    """It is for the blocks that the pool lacks, and one for the next token; whoever gives it up gets all back."""
    assert (lease.granted, lease.first_block, len(lease.destination_blocks)) == (True, has, 4 * (PROMPT - has))
    await receiver.take_back(JOB)


async def test_what_comes_back_is_not_sent(receiver: Receiver) -> None:
    question = await asked(receiver)
    assert not question.done()
    receiver.bench.copier.land()
    await check_lease(receiver, await question, has=IN_HOST)
    totals = receiver.tier.totals()
    assert (totals.loaded_blocks, totals.hit_tokens) == (
        IN_HOST - ON_DEVICE,
        0,
    )  # a prompt's hit counts where it is computed


async def test_what_a_link_brings_faster_is_sent(receiver: Receiver) -> None:
    writer = receiver.bench.peers.states["p0"]
    receiver.bench.peers.saw(msgspec.structs.replace(writer, link_bytes_per_s=1e12))
    await check_lease(receiver, await receiver.reserve(JOB), has=ON_DEVICE)
    assert not receiver.bench.copier.waiting


async def test_a_load_that_takes_long_keeps_nobody(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "LOAD_WAIT_S", 0.0)
    await check_lease(receiver, await receiver.reserve(JOB), has=ON_DEVICE)
    receiver.bench.copier.land()
    assert (await receiver.reserve(LATER)).first_block == IN_HOST
    await receiver.take_back(LATER)


async def test_a_changed_byte_is_sent(receiver: Receiver) -> None:
    question = await asked(receiver)
    receiver.bench.context.cache.tier._memory.slot(0)[5] ^= 4  # type: ignore[union-attr]
    receiver.bench.copier.land()
    lease = await question
    assert lease.first_block < IN_HOST
    assert receiver.tier.totals().bad_digests == 1
    await receiver.take_back(JOB)


async def test_who_gives_up_meanwhile_gets_no_lease(receiver: Receiver) -> None:
    question = await asked(receiver)
    await receiver.take_back(JOB)
    receiver.bench.copier.land()
    assert (await question).reason is Refusal.CANCELLED


async def test_a_question_that_is_repeated_loads_once(receiver: Receiver) -> None:
    first, again = await asked(receiver), await asked(receiver)
    assert len(receiver.bench.copier.waiting) == 1
    receiver.bench.copier.land()
    assert await first == await again
    await check_lease(receiver, await first, has=IN_HOST)


async def test_without_room_nothing_is_loaded(receiver: Receiver) -> None:
    held = receiver.bench.pool.allocate(POOL - ON_DEVICE)
    assert (await receiver.reserve(JOB)).reason is Refusal.FULL
    assert not receiver.bench.copier.waiting
    await receiver.take_back(JOB)
    receiver.bench.pool.release(held)
