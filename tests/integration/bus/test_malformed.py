"""Malformed and foreign messages over a real NATS server: counted, named, survived."""

from __future__ import annotations

import msgspec
import nats
import pytest

from common import subjects
from common.bus import NatsBus
from common.messages import (
    Ack,
    Cancel,
    ToWorker,
    WorkerReply,
    encode,
    to_worker_decoder,
    worker_reply_decoder,
)
from tests.integration.bus.looks import acknowledge, dead_letters, has_met_malformed
from tests.integration.waiting import LIMIT_S, eventually


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
