"""Readers over real ZeroMQ hear of every change, whatever their topic, and batches and what is kept of them are bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from common.blocks import pack_tokens
from tests.needs import needs
from tests.ports import own_port
from worker.events.settings import EventsSettings
from worker.events.wire import CLEARED, END_OF_REPLAY, Block, Change

needs("zmq")
import zmq  # noqa: E402

from worker.events import publisher  # noqa: E402

WAIT_MS = 60_000


class Emptied(deque[Change]):
    """A queue that the event loop clears right after a change was taken, as `Journal.retell` does."""

    def popleft(self) -> Change:
        change = super().popleft()
        self.clear()
        return change


def stored(number: int, tokens: int = 1) -> Change:
    return Change("GPU", Block(number.to_bytes(16, "big"), None, pack_tokens([number] * tokens)), True)


@contextmanager
def published(waiting: deque[Change], topic: str = "kv") -> Iterator[tuple[str, str, zmq.Context[Any]]]:
    """Addresses of the PUB and the ROUTER socket."""
    port = own_port(run=2)
    pub, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    settings = EventsSettings(endpoint=pub, replay_endpoint=replay, binds=True, topic=topic)
    told = publisher.Publisher(settings, waiting, block_size=1, retell=lambda: None)
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield pub, replay, context
    finally:
        context.destroy(linger=0)
        told.close()


def replayed(context: zmq.Context[Any], replay: str, identity: bytes = b"reader") -> list[bytes]:
    """The batches that the publisher keeps."""
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.IDENTITY, identity)
    asking.connect(replay)
    asking.send_multipart([b"", (0).to_bytes(8, "big")])
    batches = list[bytes]()
    while asking.poll(WAIT_MS):
        _, _, number, payload = asking.recv_multipart()
        if number == END_OF_REPLAY:
            asking.close(linger=0)
            return batches
        batches.append(payload)
    raise AssertionError("no end of the replay")


def replayed_once(context: zmq.Context[Any], replay: str, waiting: deque[Change]) -> list[bytes]:
    while waiting:
        time.sleep(0.01)
    return replayed(context, replay)


@pytest.mark.parametrize("topic", ["t" * 200, "\N{PILE OF POO}" * 1024])
def test_a_reader_of_a_long_exact_topic_hears_it(topic: str) -> None:
    waiting = deque[Change]()
    with published(waiting, topic) as (pub, _, context):
        hearing = context.socket(zmq.SUB)
        hearing.subscribe(topic.encode())
        hearing.connect(pub)
        for _ in range(600):  # what is sent before the subscription came is lost
            waiting.append(CLEARED)
            if hearing.poll(100):
                break
        assert hearing.recv_multipart(zmq.NOBLOCK)[0] == topic.encode()


def test_a_reader_with_a_long_identity_is_answered() -> None:
    with published(deque()) as (_, replay, context):
        replayed(context, replay, b"r" * 255)


def test_a_queue_that_is_cleared_meanwhile_ends_no_events() -> None:
    waiting = Emptied([stored(1), stored(2), stored(3)])
    with published(waiting) as (_, replay, context):
        first = replayed_once(context, replay, waiting)
        waiting.append(CLEARED)
        assert len(replayed_once(context, replay, waiting)) == len(first) + 1


def test_batches_are_cut_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "BATCH_BYTES", 400)
    waiting = deque(stored(number, tokens=50) for number in range(6))
    with published(waiting) as (_, replay, context):
        assert len(replayed_once(context, replay, waiting)) == 3


def test_what_is_kept_for_readers_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "BATCH_BYTES", 1)
    monkeypatch.setattr(publisher, "KEPT_BYTES", 1000)
    waiting = deque(stored(number, tokens=50) for number in range(100))
    with published(waiting) as (_, replay, context):
        kept = replayed_once(context, replay, waiting)
    assert len(kept) > 1
    assert sum(map(len, kept)) <= 1000
