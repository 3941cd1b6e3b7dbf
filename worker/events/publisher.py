"""The publisher of a worker's KV events over ZeroMQ, in a thread of its own. Needs pyzmq."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from common.settings import ConfigError
from worker.events.settings import EventsSettings
from worker.events.wire import CLEARED, END_OF_REPLAY, Batch, Change, events_of

log = logging.getLogger("baton.events")

POLL_MS = 10  # the longest that a change waits
BATCH_CHANGES = 512
BATCH_BYTES = 256 << 10  # packed tokens
KEPT_BYTES = 256 << 20
# MAXMSGSIZE bounds a reader's subscriptions and identity too; a topic of 1024 characters has up to 4096 bytes.
REQUEST_BYTES = 8192
RETELL_S = 30.0  # between two times that all is told again
LINGER_MS = 500


class Publisher:
    """Sends what waits in `waiting`, oldest first, numbered; keeps batches for readers that missed some.

    A batch is `[topic, number, payload]` on the PUB socket. On the ROUTER socket a reader asks for all from a number on and gets
    them as `[topic, number, payload]`, and then number -1.
    """

    def __init__(
        self, settings: EventsSettings, waiting: deque[Change], *, block_size: int, retell: Callable[[], object]
    ) -> None:
        """`retell()`, called in the publisher's thread, has everything told again. Raises ConfigError."""
        self._settings, self._waiting, self._block_size, self._retell = settings, waiting, block_size, retell
        self._topic = settings.topic.encode()
        self._sent = deque[tuple[int, bytes]]()
        self._sent_bytes = 0
        self._next = 0
        self._retold_at = time.monotonic()
        self._stopping = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._socket(zmq.PUB, settings.endpoint, binds=settings.binds, hwm=settings.hwm)
            if settings.replay_endpoint:
                self._replay = self._socket(
                    zmq.ROUTER, settings.replay_endpoint, binds=True, hwm=settings.buffer_steps + 1
                )
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--kv-events-config: endpoint {settings.endpoint} or replay_endpoint {settings.replay_endpoint}: {error}; "
                "use a free port of this machine, other ones for each worker"
            ) from None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        log.info("events.published", extra={"endpoint": settings.endpoint, "topic": settings.topic})

    def close(self) -> None:
        """Send what waits, then that nothing is here any more, and end."""
        self._waiting.append(CLEARED)
        self._stopping.set()
        self._thread.join()

    def _socket(self, kind: int, endpoint: str, *, binds: bool, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        (socket.bind if binds else socket.connect)(endpoint)
        return socket

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._send_waiting()
                if self._replay is None:
                    self._stopping.wait(POLL_MS / 1000)
                elif self._replay.poll(POLL_MS):
                    self._answer(self._replay)
            self._send_waiting()
        except Exception:
            log.exception("events.ended")
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _send_waiting(self) -> None:
        while taken := self._taken():
            batch = Batch(time.time(), events_of(taken, self._block_size), self._settings.data_parallel_rank)
            self._send(batch.encoded())

    def _taken(self) -> list[Change]:
        taken, size = list[Change](), 0
        while len(taken) < BATCH_CHANGES and size < BATCH_BYTES:
            try:
                taken.append(self._waiting.popleft())
            except IndexError:  # also where the event loop's retell() has just cleared it
                break
            block = taken[-1].block
            size += 0 if block is None else len(block.tokens)
        return taken

    def _send(self, payload: bytes) -> None:
        self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._sent.append((self._next, payload))
        self._sent_bytes += len(payload)
        while len(self._sent) > self._settings.buffer_steps or self._sent_bytes > KEPT_BYTES:
            self._sent_bytes -= len(self._sent.popleft()[1])
        self._next += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send a reader what it asks for again; what is kept no more is told anew to all."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            log.debug("events.malformed_request", extra={"frames": len(frames)})
            return
        reader, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._sent:
            if number >= first:
                replay.send_multipart((reader, b"", self._topic, number.to_bytes(8, "big"), payload), copy=False)
        replay.send_multipart((reader, b"", self._topic, END_OF_REPLAY, b""))
        is_lost = self._sent and first < self._sent[0][0]
        if is_lost and time.monotonic() - self._retold_at > RETELL_S:
            self._retold_at = time.monotonic()
            self._retell()
