"""Messages over a real NATS server: requests with answers, traces, and frames in order."""

from __future__ import annotations

import asyncio
import gc
import weakref

import msgspec
import nats
import pytest

from common.bus import NatsBus
from common.errors import NobodyListensError, UnavailableError
from common.messages import (
    Ack,
    Cancel,
    Frame,
    KVLayout,
    Received,
    Reserve,
    Tokens,
    ToWorker,
    WorkerReply,
    decode,
    encode,
    frame_decoder,
    to_worker_decoder,
    worker_reply_decoder,
)
from common.tasks import Ready
from common.tracing import trace_id
from tests.integration.bus.looks import a_job, acknowledge
from tests.integration.waiting import LIMIT_S


async def test_a_request_is_answered_by_the_handlers_result(bus: NatsBus) -> None:
    async def handler(message: ToWorker) -> WorkerReply | None:
        return Ack(known=isinstance(message, Cancel))

    await bus.serve("baton.worker.w", to_worker_decoder, handler)
    cancel = Cancel(request_id="r", attempt=1)
    assert await bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S) == Ack(known=True)


async def test_the_server_knows_a_subscription_before_it_is_said_to_be_there(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is to a ping behind the subscription: then no message of another connection is ahead of that."""
    sent, transport = bytearray(), bus._client._transport
    assert transport is not None
    write, writelines = transport.write, transport.writelines
    monkeypatch.setattr(transport, "write", lambda part: (sent.extend(part), write(part)))
    monkeypatch.setattr(transport, "writelines", lambda parts: (sent.extend(b"".join(parts)), writelines(parts)))
    await bus.serve("baton.worker.w", to_worker_decoder, acknowledge)
    assert sent.rindex(b"PING") > sent.index(b"SUB baton.worker.w")


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


async def test_what_waits_for_nothing_is_answered_in_order_where_it_is_read(bus: NatsBus) -> None:
    heard: list[int] = []

    def handler(message: ToWorker) -> Ready[WorkerReply | None]:
        assert isinstance(message, Cancel)
        heard.append(message.attempt)
        if message.attempt == 2:
            raise ValueError("a bug")
        return Ready(Ack(known=True))

    def wrong(message: ToWorker) -> asyncio.Future[WorkerReply | None]:
        return asyncio.get_running_loop().create_future()  # nobody would await it

    served = await bus.serve("baton.worker.w", to_worker_decoder, handler)
    await bus.serve("baton.worker.v", to_worker_decoder, wrong)
    questions = [
        bus.request("baton.worker.w", Cancel(request_id="r", attempt=n), worker_reply_decoder, timeout_s=LIMIT_S)
        for n in range(20)
    ]
    assert await asyncio.gather(*questions) == [Ack(known=n != 2) for n in range(20)]
    assert heard == list(range(20))
    cancel = Cancel(request_id="r", attempt=1)
    assert await bus.request("baton.worker.v", cancel, worker_reply_decoder, timeout_s=LIMIT_S) == Ack(known=False)
    await served.close()
    with pytest.raises(NobodyListensError):
        await bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S)


async def test_an_answer_that_comes_too_late_is_nobody_elses(bus: NatsBus, raw: nats.NATS) -> None:
    asked = await raw.subscribe("baton.worker.w")
    for _ in range(2):  # the client writes its first ping before what it has in store
        await raw.flush()
    cancel = Cancel(request_id="r", attempt=1)
    with pytest.raises(UnavailableError, match="no answer"):
        await bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=0.001)
    late = await asked.next_msg(LIMIT_S)
    again = asyncio.create_task(bus.request("baton.worker.w", cancel, worker_reply_decoder, timeout_s=LIMIT_S))
    question = await asked.next_msg(LIMIT_S)
    await late.respond(encode(Ack(known=False)))
    await question.respond(encode(Ack(known=True)))
    assert await again == Ack(known=True)


async def test_an_answer_goes_to_an_inbox_and_makes_nobody_a_deputy(bus: NatsBus, raw: nats.NATS) -> None:
    """NATS lets who answers publish wherever the question says."""
    served: list[ToWorker] = []

    async def handler(message: ToWorker) -> WorkerReply:
        served.append(message)
        return Ack(known=True)

    await bus.serve("baton.worker.w", to_worker_decoder, handler)
    victim = await raw.subscribe("baton.heartbeat.victim")
    cancel = encode(Cancel(request_id="r", attempt=1))
    for reply in ("baton.heartbeat.victim", "$JS.API.STREAM.PURGE.BATON_JOBS", "_INBOXES.x"):
        await raw.publish("baton.worker.w", cancel, reply=reply)
    assert decode(worker_reply_decoder, (await raw.request("baton.worker.w", cancel, timeout=LIMIT_S)).data) == Ack(
        known=True
    )
    assert (bus.forged, len(served), victim.pending_msgs) == (3, 1, 0)


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


async def test_a_message_that_fails_where_it_is_read_costs_no_other(bus: NatsBus) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    await bus._client.hear("words", lambda message: seen.put_nowait(message.data.decode()))
    for word in (b"one", b"\xff", b"two"):
        await bus._client.publish("words", word)
    async with asyncio.timeout(LIMIT_S):
        assert [await seen.get(), await seen.get()] == ["one", "two"]


async def test_nothing_is_kept_of_a_subscription_that_is_closed(bus: NatsBus) -> None:
    heard: list[Frame] = []
    last = asyncio.Event()

    def hear(frame: Frame) -> None:
        heard.append(frame)

    subscription = await bus.subscribe("baton.frames.g", frame_decoder, hear)
    is_kept = weakref.ref(hear)
    del hear
    await subscription.close()
    del subscription
    await bus.subscribe("baton.frames.g", frame_decoder, lambda _: last.set())
    await bus.publish("baton.frames.g", Frame(worker="w", incarnation=1, tokens=[]))
    async with asyncio.timeout(LIMIT_S):
        await last.wait()
    assert heard == []
    gc.collect()
    assert is_kept() is None
