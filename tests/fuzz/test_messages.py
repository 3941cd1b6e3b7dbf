"""Bytes from the bus: a decoder gives a message or says that it is malformed, and a process counts it and lives on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import nats
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from common import messages, subjects
from common.bus import NatsBus, NatsSettings, connect_bus
from common.errors import MalformedMessageError
from common.messages import Ack, Cancel, Frame, ToWorker, WorkerReply, decode, encode
from tests.fuzz.messages import DECODERS, kinds_of, raw_bytes
from tests.integration.waiting import eventually

HOSTILE = [
    b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\x91" * 200_000, b"\x81\xa1a" * 100_000, b"\xca\x7f\xc0\x00\x00", b"\xd4\x05\x00", b"\xa2\xff\xfe",
]  # fmt: skip

FEW = 25  # messages: to draw them takes most of the time


@pytest.mark.parametrize("count", [FEW, pytest.param(None, id="all", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_gives_a_message_or_says_that_there_is_none(
    name: str, count: int | None, tried: Counter[str]
) -> None:
    decoder = DECODERS[name]
    accepted = Counter[str]()  # no shrinking below: inputs are small, and it would take minutes

    @settings(
        max_examples=count or settings().max_examples, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    @given(raw=raw_bytes(decoder))
    def take(raw: bytes) -> None:
        tried[name] += 1
        try:
            message = decode(decoder, raw)
        except MalformedMessageError:
            return
        accepted[type(message).__name__] += 1
        assert isinstance(message, kinds_of(decoder))
        assert decode(decoder, encode(message)) is not None  # what was accepted can be said again

    take()
    assert accepted, "nothing got past the decoder: only its first check was tried"


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: raw[:6].hex())
def test_lying_lengths_and_deep_nesting_are_refused(name: str, raw: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(DECODERS[name], raw)


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[NatsBus]:
    async with connect_bus(NatsSettings(url=nats_url), name="fuzz") as bus:
        yield bus


async def test_a_process_counts_malformed_messages_and_answers_the_next_one(bus: NatsBus, nats_url: str) -> None:
    """On a subject that is served and on one that is heard, from somebody who may publish there."""
    heard: list[Frame] = []

    async def known(message: ToWorker) -> WorkerReply:
        return Ack(known=isinstance(message, Cancel))

    await bus.serve(subjects.worker("fuzzed"), messages.to_worker_decoder, known)
    await bus.subscribe(subjects.frames("fuzzed"), messages.frame_decoder, heard.append)
    noise = random.Random(7)
    hostile = [*HOSTILE, *(b"\xc1" + noise.randbytes(noise.randrange(200)) for _ in range(200))]
    sender = await nats.connect(nats_url)
    try:
        for subject in (subjects.worker("fuzzed"), subjects.frames("fuzzed")):
            for raw in hostile:
                await sender.publish(subject, raw)
        await sender.publish(subjects.frames("fuzzed"), encode(Frame(worker="w", incarnation=1, tokens=[])))
        cancel = encode(Cancel(request_id="request", attempt=1))
        answer = await sender.request(subjects.worker("fuzzed"), cancel, timeout=60)
        assert decode(messages.worker_reply_decoder, answer.data) == Ack(known=True)

        async def all_counted() -> bool:
            await asyncio.sleep(0)
            return bus.malformed == 2 * len(hostile) and len(heard) == 1

        assert await eventually(all_counted)
    finally:
        await sender.close()


def test_text_that_is_no_utf8_is_malformed() -> None:
    """Found by the test above: it was another exception, and one such job ended a worker."""
    cut = b"\x83\xa4type\xa6cancel\xaarequest_id\xa2\xe2\x80\xa7attempt\x01"
    with pytest.raises(MalformedMessageError):
        decode(messages.to_worker_decoder, cut)
