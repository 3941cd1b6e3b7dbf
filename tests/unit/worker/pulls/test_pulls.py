"""A prompt's blocks come from a peer instead of being computed, whole and right or not at all; and nobody keeps a block."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from common.messages import Ack, PagePart, PullBlocks, PullReply, StopPull
from kvtransfer.transport import TransferError
from tests.fakes.device import settled
from tests.fakes.worker import BLOCK
from tests.unit.worker.pulls.ends import FULL, PROMPT, of_each_kind, running_ends
from worker.pulls import puller as pulling
from worker.pulls.lender import MOST_LENT


@of_each_kind
async def test_a_peers_blocks_are_not_computed_again(parts: list[PagePart]) -> None:
    async with running_ends(parts=parts) as ends:
        ends.compute(PROMPT)
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert sequence.num_cached == FULL
        totals = ends.puller.totals
        assert (totals.pulls, totals.tokens) == (1, FULL)
        assert totals.bytes == totals.blocks * ends.receiver.context.cache.layout.block_bytes >= FULL // BLOCK


@of_each_kind
async def test_only_what_the_receiver_lacks_is_pushed(parts: list[PagePart]) -> None:
    async with running_ends(parts=parts) as ends:
        ends.compute(PROMPT)
        ends.compute(PROMPT[: 8 * BLOCK + 1], at=1)
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert [message.first_block for message in ends.heard if isinstance(message, PullBlocks)] == [8]
        assert ends.answered(sequence) == ends.expected(sequence)
        assert ends.puller.totals.tokens == FULL - 8 * BLOCK


async def test_an_answer_is_found_again_where_the_next_turn_is_computed() -> None:
    async with running_ends() as ends:
        first = ends.compute(PROMPT, max_tokens=80)
        turn = [*first.token_ids, 7, 8, 9]
        ends.compute(PROMPT, at=1)
        sequence = ends.offered(turn)
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert sequence.num_cached == (len(first.token_ids) - 1) // BLOCK * BLOCK


@of_each_kind
async def test_what_the_peer_evicted_meanwhile_is_computed(parts: list[PagePart]) -> None:
    """The index knew more: the peer pushes what it still has."""
    async with running_ends(parts=parts) as ends:
        ends.compute(PROMPT[: 12 * BLOCK + 1])
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert sequence.num_cached == 12 * BLOCK
    async with running_ends(parts=parts) as ends:
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert (sequence.num_cached, ends.puller.totals.missed) == (0, 1)


async def test_a_wrong_byte_is_a_miss() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)

        async def garbled(message: Any) -> PullReply | Ack:
            reply = await ends.lends.handle(message)
            if isinstance(message, PullBlocks):
                ends.receiver.engine.kv.view(-1)[0] += 1
            return reply

        ends.answer = garbled
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert (sequence.num_cached, ends.puller.totals.bad_digests) == (0, 1)


@pytest.mark.parametrize("count", [-3, 41, 10**6])
async def test_an_answer_that_makes_no_sense_is_a_miss(count: int) -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)

        async def boasting(message: Any) -> PullReply | Ack:
            reply = await ends.lends.handle(message)
            return msgspec.structs.replace(reply, count=count) if isinstance(reply, PullReply) else reply

        ends.answer = boasting
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert sequence.num_cached == 0


async def test_blocks_of_a_late_pull_are_nobodys_until_the_peer_says_that_it_stopped() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)
        ends.lost = {PullBlocks, StopPull}
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.puller.totals.failed == 1
        assert ends.puller.table.held_blocks == ends.receiver.pool.num_used == FULL // BLOCK
        assert ends.answered(sequence) == ends.expected(sequence)
        ends.lost = set()
        await ends.over()
        assert isinstance(ends.heard[-1], StopPull)
        again = ends.offered([*PROMPT, 5, 6, 7, 8] * 2, name="next")
        assert not ends.is_loading(again), "a peer that was late is left alone for a while"


async def test_a_lost_peer_keeps_nobody_waiting_and_its_blocks_until_its_process_is_gone() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)
        pushes = asyncio.Event()

        async def slow(message: Any) -> PullReply | Ack:
            if isinstance(message, StopPull):
                return Ack(known=False)
            await pushes.wait()
            return await ends.lends.handle(message)

        ends.answer = slow
        sequence = ends.offered()
        assert ends.is_loading(sequence)
        await settled()
        ends.puller.worker_lost("d", 1)
        await settled()
        assert not ends.is_loading(sequence)
        assert ends.puller.table.held_blocks == FULL // BLOCK
        assert ends.answered(sequence) == ends.expected(sequence)
        await ends.lender.context.transfers.transport.close()  # as its end does
        await ends.over()
        pushes.set()


async def test_a_peer_that_nobody_listens_for_has_written_nothing() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)
        ends.receiver.bus._servers.clear()
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert (ends.puller.table.held_blocks, ends.puller.totals.missed) == (0, 1)


async def test_a_failed_push_is_a_miss() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)

        async def refused(region: object) -> None:
            raise TransferError("no way")

        ends.lender.context.transfers.transport.connect = refused  # type: ignore[method-assign,assignment]
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert ends.puller.totals.missed == 1


async def test_a_pull_writes_once_and_never_after_it_was_stopped() -> None:
    """The bus may bring a question late, twice, or to a successor."""
    async with running_ends() as ends:
        ends.compute(PROMPT)
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        asked = next(message for message in ends.heard if isinstance(message, PullBlocks))
        assert await ends.lends.handle(asked) == PullReply()
        later = msgspec.structs.replace(asked, lease_id=asked.lease_id + 1)
        stop = StopPull(
            request_id="r", attempt=1, worker="p", incarnation=1, lender_incarnation=1,
            lease_id=later.lease_id, generation=later.generation,
        )  # fmt: skip
        assert await ends.lends.handle(stop) == Ack(known=True)
        assert await ends.lends.handle(later) == PullReply()
        assert await ends.lends.handle(msgspec.structs.replace(stop, lender_incarnation=2)) == Ack(known=False)
        other = msgspec.structs.replace(asked, lease_id=asked.lease_id + 2, lender_incarnation=2)
        assert await ends.lends.handle(other) == PullReply()


async def test_a_question_that_comes_twice_is_answered_once_nothing_is_written_any_more() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)

        async def twice(message: Any) -> PullReply | Ack:
            first, second = await asyncio.gather(ends.lends.handle(message), ends.lends.handle(message))
            assert first == second
            return second

        ends.answer = twice
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert ends.puller.totals.tokens == FULL


async def test_twins_wait_for_one_pull() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)
        twins = [ends.offered(name=f"r{number}") for number in range(3)]
        assert [ends.is_loading(twin) for twin in twins] == [True] * 3
        assert await ends.pulled(twins[0])
        assert sum(isinstance(message, PullBlocks) for message in ends.heard) == 1
        assert [ends.answered(twin) for twin in twins] == [ends.expected(twin) for twin in twins]


@pytest.mark.parametrize("why", ["few", "dear", "no room", "many", "unlike"])
async def test_what_does_not_pay_or_fit_is_computed(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)
        prompt = PROMPT
        match why:
            case "few":
                prompt = PROMPT[: 8 * BLOCK + 1]
            case "dear":
                ends.puller.rate.add(1, 1000.0, time.monotonic())
            case "no room":
                monkeypatch.setattr(pulling, "MOST_OF_POOL", 0.1)
            case "many":
                monkeypatch.setattr(pulling, "MOST_PULLS", 0)
            case "unlike":
                ends.receiver.peers.saw(ends.lender.state("d", incarnation=2))
        sequence = ends.offered(prompt)
        assert not ends.is_loading(sequence)
        assert ends.answered(sequence) == ends.expected(sequence)
        assert ends.heard == []


async def test_a_lender_pushes_to_a_few_at_a_time() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)
        ends.lends._lending = dict.fromkeys(range(MOST_LENT))  # type: ignore[assignment,arg-type]
        sequence = ends.offered()
        assert await ends.pulled(sequence)
        ends.lends._lending = {}
        assert ends.puller.totals.missed == 1


async def test_a_prompt_that_left_leaves_what_comes_to_the_cache() -> None:
    async with running_ends() as ends:
        ends.compute(PROMPT)
        sequence = ends.offered()
        assert ends.is_loading(sequence)
        ends.puller.left(sequence)
        await ends.over()
        later = ends.offered(name="later")
        assert not ends.is_loading(later)
        assert ends.answered(later) == ends.expected(later)
        assert later.num_cached == FULL
