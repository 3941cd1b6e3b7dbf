"""What becomes of batches over a real NATS: turns, expiry, cancelling, lost work, other releases."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from common import subjects
from common.errors import (
    OverloadedError,
)
from gateway.answers.tokenizer import ChatTokenizer
from gateway.batches import steps, store
from gateway.batches.records import BatchRecord, encode, first_step, step_decoder
from gateway.keeping import streams
from gateway.keeping.streams import Stored
from tests.integration.batches.one import LIMITS, TENANT, One, each_once, echo, unattended, work_of


async def test_what_is_not_done_in_time_expires(url: str, tokenizer: ChatTokenizer) -> None:
    limits = replace(LIMITS, concurrency=3, window_s=4.0)
    async with One(url, tokenizer, echo, limits=limits) as one:
        one.generations.hold_after = 2
        batch = await one.begin(8)
        batch = await one.end_of(batch)
        assert (batch.status, batch.completed, batch.failed, batch.output_file_id) == ("expired", 0, 8, None)
        entries = await one.entries(batch)
        each_once(entries, 8)
        assert {entry["error"]["code"] for entry in entries} == {"batch_expired"}
        await one.generations.until(lambda: not one.generations.running)  # nobody computes for it any more


async def test_batches_take_turns(url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_QUEUED_LINES", 1)
    async with One(url, tokenizer, echo) as one:
        large = await one.begin(600)
        small = await one.begin(5)
        assert (await one.end_of(small)).status == "completed"
        assert not (await one.store.batch(TENANT, large.id)).is_over
        await one.store.cancel(TENANT, large.id)
        large = await one.end_of(large)
        assert large.completed + large.failed == 600


async def test_a_crowd_of_batches_does_not_pass_a_tenant_s_bounds(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = One(url, tokenizer, echo, limits=replace(LIMITS, tenant_batches=2, tenant_kept_batches=3))
    await one.open()  # nobody runs its lines
    try:
        file_id = (await one.begin(1, tenant="crowd")).input_file_id

        def begin() -> Coroutine[Any, Any, BatchRecord]:
            return one.store.new_batch("crowd", input_file_id=file_id, endpoint="/v1/completions", metadata=None)

        crowd = await asyncio.gather(*(begin() for _ in range(10)), return_exceptions=True)
        assert [type(begun) for begun in crowd].count(OverloadedError) == 9
        kept = await one.store.batches("crowd")
        assert len(kept) == 2
        for batch in kept:
            await one.steps.step(first_step(await one.store.cancel("crowd", batch.id)))
        await begin()
        with pytest.raises(OverloadedError, match="3 batches of this API key are kept"):
            await begin()
        monkeypatch.setattr(store, "TURN_TIMEOUT_S", 0.0)
        await one.store._turns["crowd"].acquire()
        with pytest.raises(OverloadedError, match="begin here"):
            await begin()
    finally:
        await one.close()


async def test_a_batch_whose_work_was_lost_can_be_cancelled(url: str, tokenizer: ChatTokenizer) -> None:
    """Its record was written when its step had been dropped as one without a batch."""
    one = One(url, tokenizer, echo)
    await one.open()
    batch = await one.begin(1)
    await one.streams.purge(subjects.batch_step(batch.id), work=True)
    assert await work_of(one, subjects.batch_step(batch.id)) == []
    await one.store.cancel(TENANT, batch.id)
    assert await work_of(one, subjects.batch_step(batch.id)) == [subjects.batch_step(batch.id)]
    await one.close()
    async with One(url, tokenizer, echo) as other:
        assert (await other.end_of(batch)).status == "cancelled"


async def test_a_batch_that_only_another_release_can_read_is_left_to_it(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = One(url, tokenizer, echo)
    await one.open()
    batch = await one.begin(1)
    later = msgspec.msgpack.encode(msgspec.to_builtins(batch) | {"status": "paused"})
    await one.streams.put(batch.subject, later)
    step = next(
        found for found in await one.streams.fetch("step", 100) if step_decoder.decode(found.data).batch == batch.id
    )
    monkeypatch.setattr(steps, "FAILURE_RETRY_S", 0.0)
    await one.steps._take(step)
    assert await work_of(one, subjects.batch_step(batch.id)) == [subjects.batch_step(batch.id)]
    await one.streams.put(batch.subject, encode(batch))
    await one.close()
    async with One(url, tokenizer, echo) as other:
        assert (await other.end_of(batch)).status == "completed"


async def test_a_batch_that_changes_while_all_are_read_is_listed_once(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PAGE", 1)
    async with unattended(url, tokenizer) as one:
        first = await one.begin(1, tenant="changing")
        second = await one.begin(1, tenant="changing")
        read, cancelled = one.streams._read, False

        async def read_and_cancel(subject: str, *, after: int, limit: int) -> list[Stored]:
            nonlocal cancelled
            page = await read(subject, after=after, limit=limit)
            if not cancelled:
                cancelled = True
                await one.store.cancel("changing", first.id)
            return page

        monkeypatch.setattr(one.streams, "_read", read_and_cancel)
        listed = [(batch.id, batch.status) for batch in await one.store.batches("changing")]
        assert sorted(listed) == sorted([(first.id, "cancelling"), (second.id, "validating")])


async def test_large_results_are_read_a_few_at_a_time(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PAGE_BYTES", 100_000)
    async with unattended(url, tokenizer) as one:
        for number in range(10):
            await one.streams.create(subjects.batch_result("large", number), b"%d" % number + b"x" * 60_000)
        every = subjects.batch_result("large", "*")
        assert len(await one.streams._read(every, after=0, limit=streams.PAGE)) < 5
        assert [stored.data[:1] async for stored in one.streams.scan(every)] == [b"%d" % n for n in range(10)]
        await one.streams.purge(every)
