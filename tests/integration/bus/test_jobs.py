"""The work queue over a real NATS server: no job is lost or repeated without a trace."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig

from common import subjects
from common.bus import Delivery, NatsBus
from common.errors import OverloadedError
from common.messages import (
    Job,
)
from tests.integration.bus.looks import QUICK, a_job, dead_letters, is_empty, some_jobs
from tests.integration.waiting import LIMIT_S, eventually


async def test_a_job_goes_to_its_worker_and_ends_with_the_ack(bus: NatsBus, raw: nats.NATS) -> None:
    mine, other = await bus.jobs("mine"), await bus.jobs("other")
    await bus.publish_job("mine", a_job())
    assert await other.fetch(8, expires_s=0.05) == []
    (delivery,) = await some_jobs(mine)
    assert (delivery.job, delivery.num_delivered) == (a_job(), 1)
    await delivery.ack()
    await delivery.ack()  # over already: nothing happens
    await eventually(lambda: is_empty(raw))


async def test_a_waiting_worker_gets_the_first_job_without_waiting_for_more(bus: NatsBus) -> None:
    queue = await bus.jobs("w")
    fetching = asyncio.create_task(queue.fetch(8, expires_s=10 * LIMIT_S))
    await asyncio.sleep(0)
    await bus.publish_job("w", a_job())
    async with asyncio.timeout(LIMIT_S):
        assert [delivery.job for delivery in await fetching] == [a_job()]


async def test_queued_jobs_come_together_in_order_and_no_more_than_asked_for(bus: NatsBus) -> None:
    queue = await bus.jobs("w")
    for number in range(5):
        await bus.publish_job("w", a_job(f"request-{number}"))
    first, second = await queue.fetch(3), await queue.fetch(3)
    assert [delivery.job.request_id for delivery in first + second] == [f"request-{number}" for number in range(5)]


async def test_another_worker_s_job_is_not_taken_whoever_changed_the_consumer(bus: NatsBus, raw: nats.NATS) -> None:
    queue = await bus.jobs("w")
    jetstream, name = raw.jetstream(), "worker-w"
    known = await jetstream.consumer_info(subjects.JOBS_STREAM, name)
    changed = ConsumerConfig(**{**known.config.__dict__, "filter_subject": subjects.jobs("other")})
    await jetstream.add_consumer(subjects.JOBS_STREAM, changed)
    await bus.publish_job("other", a_job("theirs"))
    assert await queue.fetch(8, expires_s=0.2) == []
    await bus.publish_job("w", a_job("ours"))
    assert [delivery.job.request_id for delivery in await some_jobs(queue)] == ["ours"]
    assert [delivery.job.request_id for delivery in await some_jobs(await bus.jobs("other"))] == ["theirs"]


async def test_the_same_attempt_is_queued_once(bus: NatsBus) -> None:
    queue = await bus.jobs("w")
    assert await bus.publish_job("w", a_job()) == await bus.publish_job("w", a_job())
    await bus.publish_job("w", a_job(attempt=2))
    assert [delivery.job.attempt for delivery in await queue.fetch(8)] == [1, 2]


@pytest.mark.parametrize("limits", [QUICK], ids=["quick"])
async def test_a_job_that_nobody_ends_comes_again_and_then_goes_to_the_dead_letters(
    bus: NatsBus, raw: nats.NATS
) -> None:
    queue = await bus.jobs("w")
    await bus.publish_job("w", a_job())
    numbers = []
    for _ in range(QUICK.max_deliver):
        (delivery,) = await some_jobs(queue)
        numbers.append(delivery.num_delivered)
    assert numbers == [1, 2]

    async def letters_after_another_pull() -> list[nats.js.api.RawStreamMsg]:
        assert await queue.fetch(1, expires_s=0.2) == []
        return await dead_letters(raw)

    (letter,) = await eventually(letters_after_another_pull)
    assert letter.subject == "baton.dead.job"
    assert msgspec.msgpack.decode(letter.data or b"", type=Job) == a_job()
    await eventually(lambda: is_empty(raw))
    assert bus.dead_letters == 1


@pytest.mark.parametrize("limits", [QUICK], ids=["quick"])
async def test_a_job_delivered_too_often_is_moved_away_when_the_server_is_slow_to_answer(
    bus: NatsBus, raw: nats.NATS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server tells of it once: a job that stayed then stayed for an hour."""
    answer, asked = JetStreamContext.get_msg, 0

    async def late_once(*arguments: Any, **options: Any) -> nats.js.api.RawStreamMsg:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise nats.errors.TimeoutError
        return await answer(*arguments, **options)

    monkeypatch.setattr(JetStreamContext, "get_msg", late_once)
    queue = await bus.jobs("w")
    await bus.publish_job("w", a_job())
    for _ in range(QUICK.max_deliver):
        await some_jobs(queue)

    async def moved() -> bool:
        assert await queue.fetch(1, expires_s=0.2) == []
        return bus.dead_letters == 1

    await eventually(moved)
    await eventually(lambda: is_empty(raw))
    assert asked >= 2


@pytest.mark.parametrize("limits", [QUICK], ids=["quick"])
async def test_in_progress_keeps_a_job_from_coming_again(bus: NatsBus) -> None:
    queue, on_time = await bus.jobs("w"), False
    while not on_time:  # on a busy machine a word may come too late
        on_time = True
        await bus.publish_job("w", job := a_job(f"request-{time.monotonic()}"))
        (delivery,) = await some_jobs(queue)
        said_at, again = time.monotonic(), list[Delivery]()
        for _ in range(10):  # together twice the ack-wait
            again += await queue.fetch(1, expires_s=0.1)
            await delivery.in_progress()
            on_time &= time.monotonic() - said_at < QUICK.ack_wait_s - 0.1
            said_at = time.monotonic()
        if on_time:
            assert again == []
            (second,) = await some_jobs(queue)  # without a word it comes again
            assert (second.num_delivered, second.job) == (2, job)
        else:
            await delivery.term()


async def test_a_nak_brings_the_job_back_and_a_term_ends_it(bus: NatsBus, raw: nats.NATS) -> None:
    queue = await bus.jobs("w")
    await bus.publish_job("w", a_job())
    (delivery,) = await some_jobs(queue)
    await delivery.nak()
    (delivery,) = await some_jobs(queue)
    assert delivery.num_delivered == 2
    await delivery.term()
    await eventually(lambda: is_empty(raw))
    assert await dead_letters(raw) == []


async def test_a_deleted_job_is_not_delivered(bus: NatsBus) -> None:
    queue = await bus.jobs("w")
    unwanted = a_job("unwanted")
    await bus.delete_job(await bus.publish_job("w", unwanted), unwanted)
    await bus.delete_job(12_345, unwanted)  # unknown: nothing happens
    wanted = await bus.publish_job("w", a_job("wanted"))
    await bus.delete_job(wanted, unwanted)  # a number that is another job's since the server was restarted
    assert [delivery.job.request_id for delivery in await some_jobs(queue)] == ["wanted"]


async def test_a_job_is_in_the_queue_until_it_is_over(bus: NatsBus) -> None:
    job = a_job("r")
    number, queue = await bus.publish_job("w", job), await bus.jobs("w")
    assert await bus.has_job(number)
    (delivery,) = await some_jobs(queue)
    assert await bus.has_job(number), "in a worker's hands"
    await bus.delete_job(number, job)
    assert not await bus.has_job(number)
    await delivery.term()


async def test_a_full_queue_refuses_with_overloaded(bus: NatsBus) -> None:
    for number in range(QUICK.max_jobs):
        await bus.publish_job("w", a_job(f"request-{number}"))
    with pytest.raises(OverloadedError):
        await bus.publish_job("w", a_job("one too many"))


async def test_a_malformed_job_is_kept_as_a_dead_letter_and_the_next_one_comes(bus: NatsBus, raw: nats.NATS) -> None:
    queue = await bus.jobs("w")
    await raw.jetstream().publish(subjects.jobs("w"), b"\xc1 no job")
    await bus.publish_job("w", a_job())
    assert [delivery.job for delivery in await some_jobs(queue)] == [a_job()]
    (letter,) = await eventually(lambda: dead_letters(raw))
    assert (letter.subject, letter.data) == ("baton.dead.malformed", b"\xc1 no job")
    assert bus.malformed == 1


async def test_a_deleted_stream_and_consumer_are_made_again_by_their_next_use(bus: NatsBus, raw: nats.NATS) -> None:
    queue = await bus.jobs("w")
    await raw.jetstream().delete_stream(subjects.JOBS_STREAM)
    await bus.publish_job("w", a_job("first"))
    assert [delivery.job.request_id for delivery in await some_jobs(queue)] == ["first"]


async def test_a_consumer_deleted_under_a_waiting_worker_is_made_again(bus: NatsBus, raw: nats.NATS) -> None:
    queue = await bus.jobs("w")
    fetching = asyncio.create_task(queue.fetch(8, expires_s=10 * LIMIT_S))

    async def is_waiting() -> bool:
        return bool((await raw.jetstream().consumer_info(subjects.JOBS_STREAM, "worker-w")).num_waiting)

    await eventually(is_waiting)
    await raw.jetstream().delete_consumer(subjects.JOBS_STREAM, "worker-w")
    async with asyncio.timeout(LIMIT_S):
        assert await fetching == []
    await bus.publish_job("w", a_job())
    assert [delivery.job for delivery in await some_jobs(queue)] == [a_job()]
