"""A prompt with columns goes from one worker's memory to another's, and what the receiver has of it stays where it is."""

from __future__ import annotations

import pytest

from common.blocks import unpack_tokens
from common.messages import PagePart, Reserve, ReserveReply, SamplingParams, WriterDone
from common.words import Refusal
from engine.cache.block_pool import BlockPool
from tests.fakes.pair import Pair, running_worker
from tests.fakes.worker import BLOCK, new_job

PARTS = [
    PagePart(layers=1, planes=2, heads=1, dim=4, dtype="float32"),
    PagePart(layers=2, planes=2, heads=1, dim=4, dtype="float32", window=10),
]
M, SEEN = 2, 3  # blocks of a column, and columns that the first token of a block sees behind itself
SHORT = SamplingParams(max_tokens=3, temperature=0.0)  # the prompt's last columns stay
LONG = SamplingParams(max_tokens=14, temperature=0.0)  # all of them go


def evict(pool: BlockPool, num_cached: int) -> None:
    """Leave all cached blocks but so many."""
    pool.release(pool.allocate(pool.num_free - pool.num_cached + num_cached))


@pytest.mark.parametrize("num_tokens", [32, 33, 45])
async def test_what_the_receiver_has_is_not_pushed_again(num_tokens: int) -> None:
    """From all that it had of the prompt to nothing, a block less each time: its last columns go first."""
    prompt = list(range(100, 100 + num_tokens))
    num_blocks, oldest = -(-num_tokens // BLOCK), num_tokens // BLOCK - SEEN
    most, had = num_tokens // BLOCK + SEEN * M, set()
    async with running_worker(parts=PARTS) as writer, running_worker(parts=PARTS) as receiver:
        pair = Pair(writer, receiver)
        expected = receiver.engine.expected(prompt, LONG.max_tokens, LONG)
        for evicted in range(most + 1):
            evict(receiver.pool, receiver.pool.num_cached)
            assert await pair.answer(f"first {evicted}", prompt, SHORT) == expected[: SHORT.max_tokens]
            assert (pair.replies[-1].first_block, pair.replies[-1].first_entries) == (0, [oldest])
            assert receiver.pool.num_cached == most
            evict(receiver.pool, evicted)
            assert await pair.answer(f"again {evicted}", prompt, LONG) == expected
            assert writer.gateway.ended[f"again {evicted}"] == "settled"
            reply = pair.replies[-1]
            pushed = num_blocks - reply.first_block + M * (num_blocks - reply.first_entries[0])
            assert len(unpack_tokens(reply.destination_blocks)) == pushed
            had.add((reply.first_block, reply.first_entries[0] - oldest))
            assert (writer.pool.num_used, receiver.pool.num_used) == (0, 0)
        await pair.decode.close()
    assert {columns for _, columns in had} == {0, 1, 2, SEEN}
    assert (num_tokens // BLOCK, SEEN) in had
    assert (0, 0) in had


async def test_what_was_found_goes_back_when_there_is_no_room_and_when_the_writer_gives_up() -> None:
    prompt = list(range(100, 133))
    async with running_worker(parts=PARTS) as writer, running_worker(parts=PARTS) as receiver:
        pair, pool = Pair(writer, receiver), receiver.pool
        await pair.answer("first", prompt, SHORT)
        job = new_job("again", prompt, LONG, prefill=True)
        identity, layout = writer.context.identity, writer.context.cache.layout
        question = Reserve(
            job=job, worker=identity.worker, incarnation=identity.incarnation, remaining_ms=60_000, layout=layout
        )
        others = pool.allocate(pool.num_free - pool.num_cached)
        full = await pair.decode.handle(question)
        assert isinstance(full, ReserveReply)
        assert (full.reason, pool.num_used) == (Refusal.FULL, len(others))
        pool.release(others)
        lease = await pair.decode.handle(question)
        assert isinstance(lease, ReserveReply)
        assert (lease.first_block, lease.first_entries) == (8, [8])
        await pair.decode.handle(WriterDone(**identity.head(job), lease_id=lease.lease_id, generation=lease.generation))
        assert pool.num_used == 0
        await pair.decode.close()
