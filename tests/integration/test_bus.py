"""The bus against a real NATS server: requests, ordered frames, and a work queue that loses and repeats nothing in silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StorageType

from common import subjects
from common.bus import Delivery, JobQueue, NatsBus, NatsSettings, QueueLimits, connect_bus
from common.errors import NobodyListensError, OverloadedError, UnavailableError
from common.messages import (
    Ack,
    Cancel,
    Frame,
    Job,
    KVLayout,
    Received,
    Reserve,
    SamplingParams,
    Tokens,
    ToWorker,
    WorkerReply,
    encode,
    frame_decoder,
    to_worker_decoder,
    worker_reply_decoder,
)
from common.servers import run_nats
from common.tracing import trace_id
from tests.integration.waiting import LIMIT_S, eventually

QUICK = QueueLimits(ack_wait_s=0.5, max_deliver=2, max_jobs=20)


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[NatsBus]:
    async with connect_bus(NatsSettings(url=nats_url), name="test", limits=QUICK) as bus:
        yield bus
    client = await nats.connect(nats_url)
    for stream in (subjects.JOBS_STREAM, subjects.DEAD_STREAM):
        await client.jetstream().delete_stream(stream)  # so that each test starts with empty queues
    await client.close()


@pytest.fixture
async def raw(nats_url: str) -> AsyncIterator[nats.NATS]:
    """A plain client beside the bus, to look at and to disturb."""
    client = await nats.connect(nats_url)
    yield client
    await client.close()


def a_job(request_id: str = "request", *, attempt: int = 1) -> Job:
    return Job(
        request_id=request_id,
        attempt=attempt,
        gateway="gateway",
        token_ids=b"\x01\x00\x00\x00",
        num_prompt_tokens=1,
        hash_root=b"root",
        sampling=SamplingParams(max_tokens=4),
        decode_workers=["decode-0"],
        deadline_ms=10_000,
    )


async def some_jobs(queue: JobQueue) -> list[Delivery]:
    return await eventually(lambda: queue.fetch(8, expires_s=0.5))


async def dead_letters(raw: nats.NATS) -> list[nats.js.api.RawStreamMsg]:
    jetstream = raw.jetstream()
    count = (await jetstream.stream_info(subjects.DEAD_STREAM)).state.messages
    return [await jetstream.get_msg(subjects.DEAD_STREAM, sequence + 1) for sequence in range(count)]


# -- core --------------------------------------------------------------------------------------------------------------


async def test_a_request_is_answered_by_the_handlers_result(bus: NatsBus) -> None:
    async def handler(message: ToWorker) -> WorkerReply | None:
        return Ack(known=isinstance(message, Cancel))

    await bus.serve("baton.worker.w", to_worker_decoder, handler)
    cancel = Cancel(request_id="r", attempt=1)
    assert await bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S) == Ack(known=True)


async def test_a_request_that_nobody_listens_to_fails_at_once(bus: NatsBus) -> None:
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(NobodyListensError, match=r"baton\.worker\.nobody"):
            await bus.request(
                "baton.worker.nobody", Cancel(request_id="r", attempt=1), worker_reply_decoder, timeout_s=60
            )


async def test_a_handler_that_raises_answers_known_false_and_serves_on(bus: NatsBus) -> None:
    async def handler(message: ToWorker) -> WorkerReply | None:
        if isinstance(message, Cancel) and message.attempt == 1:
            raise ValueError("a bug")
        return Ack(known=True)

    await bus.serve("baton.worker.w", to_worker_decoder, handler)
    for attempt, known in ((1, False), (2, True)):
        cancel = Cancel(request_id="r", attempt=attempt)
        assert await bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S) == Ack(known=known)


async def test_handlers_of_one_subject_run_beside_each_other(bus: NatsBus) -> None:
    first_waits, second_came = asyncio.Event(), asyncio.Event()

    async def handler(message: ToWorker) -> WorkerReply | None:
        if isinstance(message, Cancel):
            first_waits.set()
            await second_came.wait()
        else:
            second_came.set()
        return Ack(known=True)

    await bus.serve("baton.worker.w", to_worker_decoder, handler)
    cancel = Cancel(request_id="r", attempt=1)
    waiting = asyncio.create_task(bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S))
    await first_waits.wait()
    await bus.publish("baton.worker.w", Received(request_id="r", attempt=1))
    assert await waiting == Ack(known=True)


CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_handler_runs_in_the_trace_of_its_message_and_the_next_one_does_not(bus: NatsBus) -> None:
    traces: dict[str, list[str]] = {"served": [], "heard": []}
    done = asyncio.Event()

    async def serving(message: ToWorker) -> WorkerReply | None:
        await asyncio.sleep(0)
        traces["served"].append(trace_id.get())
        return Ack(known=True)

    def hearing(message: ToWorker) -> None:
        traces["heard"].append(trace_id.get())
        if len(traces["heard"]) == 4:
            done.set()
        raise ValueError("a bug")  # it is logged in the trace as well, and that ends with it

    await bus.serve("baton.worker.served", to_worker_decoder, serving)
    await bus.subscribe("baton.worker.heard", to_worker_decoder, hearing)
    job = msgspec.structs.replace(a_job(), traceparent=CONTEXT)
    layout = KVLayout(num_blocks=1, num_layers=1, block_size=1, num_kv_heads=1, head_dim=1, dtype="float32")
    for message in (
        Cancel(request_id="r", attempt=1, traceparent=CONTEXT),
        Cancel(request_id="r", attempt=1),
        Reserve(job=job, worker="w", incarnation=1, remaining_ms=1, layout=layout),
        Cancel(request_id="r", attempt=1, traceparent=CONTEXT + "\n"),  # who said this is not to be trusted
    ):
        await bus.request("baton.worker.served", message, worker_reply_decoder, timeout_s=LIMIT_S)
        await bus.publish("baton.worker.heard", message)
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert traces["served"] == traces["heard"] == [CONTEXT[3:35], "", CONTEXT[3:35], ""]
    assert trace_id.get() == ""


async def test_frames_arrive_in_order(bus: NatsBus) -> None:
    positions: list[int] = []
    done = asyncio.Event()

    def handler(frame: Frame) -> None:
        positions.append(frame.tokens[0].position)
        if len(positions) == 500:
            done.set()

    await bus.subscribe("baton.frames.g", frame_decoder, handler)
    for position in range(500):
        tokens = Tokens(request_id="r", attempt=1, position=position, token_ids=b"")
        await bus.publish("baton.frames.g", Frame(worker="w", incarnation=1, tokens=[tokens]))
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert positions == list(range(500))


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xc1", msgspec.msgpack.encode({"type": "no such"}), b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"],
    ids=["empty", "no msgpack", "unknown type", "nested too deeply"],
)
async def test_a_malformed_message_is_counted_kept_and_survived(bus: NatsBus, raw: nats.NATS, garbage: bytes) -> None:
    async def handler(message: ToWorker) -> WorkerReply | None:
        return Ack(known=True)

    await bus.serve("baton.worker.w", to_worker_decoder, handler)
    cancel = Cancel(request_id="r", attempt=1)
    assert await bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S) == Ack(known=True)
    await raw.publish("baton.worker.w", garbage)  # the answer says that the server knows of the subscription
    await eventually(lambda: has_met_malformed(bus, 1))
    assert await bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S) == Ack(known=True)
    (letter,) = await eventually(lambda: dead_letters(raw))
    assert letter.subject == "baton.dead.malformed"
    assert letter.data in (garbage[: 64 << 10], None)
    assert letter.headers is not None
    assert letter.headers["Baton-Subject"] == "baton.worker.w"
    assert letter.headers["Baton-Bytes"] == str(len(garbage))


async def test_a_release_out_of_reach_is_named_once_and_fills_no_dead_letters(
    bus: NatsBus, raw: nats.NATS, caplog: pytest.LogCaptureFixture
) -> None:
    """It beats twice a second for as long as it runs."""
    subject = subjects.worker("decode-0")
    await bus.serve(subject, to_worker_decoder, acknowledge)
    cancel = Cancel(request_id="r", attempt=1)
    await bus.request(subject, cancel, worker_reply_decoder, timeout_s=LIMIT_S)  # the server knows of the subscription
    foreign = encode(msgspec.structs.replace(cancel, v=9))
    for message in (foreign, foreign, msgspec.msgpack.encode({"v": 9, "type": "of a later release"})):
        await raw.publish(subject, message)
    await eventually(lambda: has_met_malformed(bus, 3))
    refused = [record for record in caplog.records if record.message == "bus.version_refused"]
    assert [record.__dict__["subject"] for record in refused] == [subject]
    assert "protocol version 9" in refused[0].__dict__["error"]
    assert "one release at a time" in refused[0].__dict__["error"]
    assert bus.dead_letters == 0


async def test_a_stream_that_another_release_made_for_good_is_named_with_the_remedy(
    nats_url: str, raw: nats.NATS
) -> None:
    stream = raw.jetstream()
    await stream.add_stream(name=subjects.JOBS_STREAM, subjects=["baton.jobs.*"], storage=StorageType.FILE)
    try:
        with pytest.raises(UnavailableError, match=f"nats stream rm {subjects.JOBS_STREAM}"):
            async with connect_bus(NatsSettings(url=nats_url), name="test", limits=QUICK):
                pass
    finally:
        await stream.delete_stream(subjects.JOBS_STREAM)


async def test_a_flood_of_malformed_messages_is_counted_but_not_kept(bus: NatsBus, raw: nats.NATS) -> None:
    async def handler(message: ToWorker) -> WorkerReply | None:
        return Ack(known=True)

    await bus.serve("baton.worker.w", to_worker_decoder, handler)
    cancel = Cancel(request_id="r", attempt=1)
    await bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S)
    for _ in range(500):
        await raw.publish("baton.worker.w", b"\xc1")
    await eventually(lambda: has_met_malformed(bus, 500))
    assert bus.dead_letters < 100


async def test_connecting_to_nothing_says_where_it_tried_and_not_the_password() -> None:
    settings = NatsSettings(url="nats://me:secret@127.0.0.1:1", connect_timeout_s=0.2)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1") as raised:
        async with connect_bus(settings, name="test"):
            pass
    assert "secret" not in raised.value.message


# -- jobs --------------------------------------------------------------------------------------------------------------


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


async def test_the_same_attempt_is_queued_once(bus: NatsBus) -> None:
    queue = await bus.jobs("w")
    assert await bus.publish_job("w", a_job()) == await bus.publish_job("w", a_job())
    await bus.publish_job("w", a_job(attempt=2))
    assert [delivery.job.attempt for delivery in await queue.fetch(8)] == [1, 2]


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


async def test_in_progress_keeps_a_job_from_coming_again(bus: NatsBus) -> None:
    queue = await bus.jobs("w")
    await bus.publish_job("w", a_job())
    (delivery,) = await some_jobs(queue)
    again: list[Delivery] = []
    for _ in range(10):  # together twice the ack-wait
        again += await queue.fetch(1, expires_s=0.1)
        await delivery.in_progress()
    assert again == []
    (second,) = await some_jobs(queue)  # without a word it comes again
    assert second.num_delivered == 2


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


# -- a server that goes away -------------------------------------------------------------------------------------------


async def test_a_restart_of_nats_brings_subscriptions_streams_and_consumers_back(tmp_path: Path) -> None:
    frames: asyncio.Queue[Frame] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        server = await first.enter_async_context(run_nats(data_dir=tmp_path))
        try:
            bus = await stack.enter_async_context(connect_bus(NatsSettings(url=server.url), name="test"))
            await bus.subscribe("baton.frames.g", frame_decoder, frames.put_nowait)
            queue = await bus.jobs("w")
            await bus.publish_job("w", a_job("lost with the server's memory"))
        finally:
            server.process.kill()
            await first.aclose()

        async def is_disconnected() -> bool:
            return not bus.connected

        await eventually(is_disconnected)
        assert await queue.fetch(1, expires_s=0.05) == []
        with pytest.raises(UnavailableError):
            await bus.publish_job("w", a_job())
        with pytest.raises(UnavailableError):
            await bus.request("baton.worker.w", Cancel(request_id="r", attempt=1), worker_reply_decoder, timeout_s=60)
        await bus.publish("baton.frames.g", Frame(worker="stored while away", incarnation=1, tokens=[]))

        await stack.enter_async_context(run_nats(port=server.port, data_dir=tmp_path))
        async with asyncio.timeout(LIMIT_S):
            assert (await frames.get()).worker == "stored while away"
        await bus.publish_job("w", a_job("after"))
        assert [delivery.job.request_id for delivery in await some_jobs(queue)] == ["after"]
        assert bus.reconnects == 1


async def test_what_is_published_while_disconnected_is_bounded(tmp_path: Path) -> None:
    async with run_nats(data_dir=tmp_path) as server, connect_bus(NatsSettings(url=server.url), name="test") as bus:
        server.process.kill()

        async def is_disconnected() -> bool:
            return not bus.connected

        await eventually(is_disconnected)
        megabyte = Tokens(request_id="r", attempt=1, position=0, token_ids=bytes(1 << 20))
        frame = Frame(worker="w", incarnation=1, tokens=[megabyte])
        for _ in range(31):
            await bus.publish("baton.frames.g", frame)
        with pytest.raises(UnavailableError, match="OutboundBufferLimit"):
            await bus.publish("baton.frames.g", frame)


async def has_met_malformed(bus: NatsBus, count: int) -> bool:
    return bus.malformed == count


async def is_empty(raw: nats.NATS) -> bool:
    return (await raw.jetstream().stream_info(subjects.JOBS_STREAM)).state.messages == 0


async def acknowledge(message: ToWorker) -> Ack:
    """A handler."""
    return Ack(known=True)
