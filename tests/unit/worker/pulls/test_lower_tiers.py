"""A lender brings back what its host memory has of a prefix before it pushes that; what fails there is a miss."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.messages import PagePart, PullBlocks, StopPull
from tests.fakes.device import settled
from tests.fakes.worker import BLOCK
from tests.unit.worker.pulls.ends import FULL, NUM_BLOCKS, PROMPT, Ends, of_each_kind, running_ends
from worker.pulls import lender as lending

HOST = {"host_slots": 4 * NUM_BLOCKS}


@of_each_kind
async def test_what_the_peer_has_in_host_memory_alone_is_pulled(parts: list[PagePart]) -> None:
    async with running_ends(parts=parts, **HOST) as ends:
        ends.sink()
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert (sequence.num_cached, ends.puller.totals.tokens) == (FULL, FULL)
        totals = ends.lender.tier.totals()  # type: ignore[union-attr]
        assert totals.loaded_blocks >= FULL // BLOCK
        assert totals.hit_tokens == 0  # a prompt's hit counts where it is computed


async def test_what_the_pool_has_is_pushed_with_what_host_memory_adds() -> None:
    async with running_ends(**HOST) as ends:
        ends.sink()
        ends.compute(PROMPT[: 8 * BLOCK + 1])
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert sequence.num_cached == FULL
        assert ends.lender.tier.totals().loaded_blocks == FULL // BLOCK - 8  # type: ignore[union-attr]


async def test_a_flipped_bit_in_the_peers_host_memory_is_a_miss() -> None:
    async with running_ends(**HOST) as ends:
        ends.sink()
        tier = ends.lender.tier
        assert tier is not None
        for block in list(tier.blocks):
            for slot in tier.blocks.get(block).all_slots:  # type: ignore[union-attr]
                tier._memory.slot(slot)[5] ^= 4
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert (sequence.num_cached, ends.puller.totals.missed) == (0, 1)
        assert tier.totals().bad_digests == FULL // BLOCK


async def test_a_load_that_takes_long_leaves_time_to_push_what_the_pool_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LOAD_SHARE", 0.0)
    async with running_ends(**HOST) as ends:
        ends.sink()
        ends.compute(PROMPT[: 20 * BLOCK + 1])
        ends.lands = False
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert sequence.num_cached == 20 * BLOCK
        ends.lender.copier.land()
        assert ends.lender.pool.count_prefix(sequence.known_digests) == FULL // BLOCK  # it came for the next one


@pytest.mark.parametrize("why", ["much", "held", "due"])
async def test_nothing_is_brought_back_that_takes_others_room(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_ends(**HOST) as ends:
        ends.sink()
        pool, turns = ends.lender.pool, ends.lender.context.cache.turns
        held = pool.allocate(pool.num_blocks - 20) if why == "held" else []
        if why == "much":
            monkeypatch.setattr(lending, "MOST_OF_POOL", 0.1)
        if why == "due":
            turns.waits("large", blocks=pool.num_blocks - 20, passed=10**6)
            turns.admitted("small")
            assert turns.due == ["large"]
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert (sequence.num_cached, ends.puller.totals.missed) == (0, 1)
        assert ends.lender.tier.totals().loaded_blocks == 0  # type: ignore[union-attr]
        pool.release(held)


async def _until_loading(ends: Ends) -> None:
    async with asyncio.timeout(60):
        while not ends.lender.copier.waiting:
            await asyncio.sleep(0.001)


async def test_who_stops_a_pull_while_it_is_loaded_is_written_nothing() -> None:
    async with running_ends(**HOST) as ends:
        ends.sink()
        ends.lands = False
        sequence = ends.offered()
        assert ends.is_loading(sequence)
        await _until_loading(ends)
        ends.puller.worker_lost("d", 1)
        await ends.over()
        assert any(isinstance(message, StopPull) for message in ends.heard)
        before = ends.receiver.engine.kv.clone()
        ends.lender.copier.land()
        await settled()
        assert (ends.receiver.engine.kv == before).all()
        assert ends.answered(sequence) == ends.expected(sequence)


async def test_the_time_to_load_is_no_part_of_the_links_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow disk would keep all from pulling what pools have."""
    async with running_ends(**HOST) as ends:
        taken = list[float]()
        monkeypatch.setattr(ends.puller.rate, "add", lambda _, seconds, now: taken.append(seconds))
        ends.compute(list(range(261, 330)))
        assert await ends.pulled(ends.offered(list(range(261, 330)), name="opens the link"))
        ends.sink()
        ends.lands = False
        sequence, began = ends.offered(), time.monotonic()
        assert ends.is_loading(sequence)
        await _until_loading(ends)
        await asyncio.sleep(0.2)
        ends.lender.copier.land()
        while ends.is_loading(sequence):
            await asyncio.sleep(0.001)
        # It began later, and 0.2 s of it went to loading, which is told in whole milliseconds.
        assert 0 <= taken[-1] <= time.monotonic() - began - 0.199
        assert [type(message) for message in ends.heard] == [PullBlocks] * 2
        ends.puller.left(sequence)
