"""The storage of a background answer's events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from common.errors import OverloadedError, UnavailableError
from gateway.answers.answer import Delivery, settle
from gateway.answers.choice import Choice, Piece
from gateway.dialects.dialect import Events as Writing
from gateway.observe.metrics import AnswerMetrics
from gateway.responses.records import END_OF_EVENT, Events, ResponseRecord
from gateway.responses.store import ResponseStore

KEEP_FOR_S = 60.0
KEEP_RETRY_S = 0.5
MAX_UNKEPT_BYTES = 1 << 20  # beyond this, tokens wait for the storage
FIRST_RUN, FIRST_EVENT = 1, 2  # run 0 announced the queued response


Value = TypeVar("Value")


class SupersededError(Exception):
    """Another gateway ended this response, or is running it."""


async def insisting(call: Callable[[], Awaitable[Value]]) -> Value:
    """Return the result of `call`, retrying for a time while NATS is down or full. Raises ServingError."""
    until = time.monotonic() + KEEP_FOR_S
    while True:
        try:
            return await call()
        except (UnavailableError, OverloadedError):
            if time.monotonic() > until:
                raise
        await asyncio.sleep(KEEP_RETRY_S)


class KeptStream:
    """A reader of an answer; `write` stores the additions since its last call."""

    def __init__(self, store: ResponseStore, record: ResponseRecord, writing: Writing, metrics: AnswerMetrics) -> None:
        self.writing = writing
        self.takes_text = writing.tell_text_alone
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.kept_bytes = 0
        self.delivery: Delivery | None = None
        self._store = store
        self._record = record
        self._metrics = metrics
        self._parts = [writing.opening()]
        self._size = 0
        self._has_said = False
        self._run, self._event = FIRST_RUN, FIRST_EVENT

    async def write(self, closing: bytes = b"") -> None:
        """Store a run of events, the last one with `closing`. Raises SupersededError, StoreFullError, UnavailableError.

        Nothing is kept before the first piece came: until then another gateway may begin the answer anew.
        """
        if not closing and not self._has_said:
            return
        data = b"".join((*self._parts, closing))
        self._parts.clear()
        self._size = 0
        if self.delivery is not None:
            self.delivery.wake()
        if not data:
            return
        run = Events(first=self._event, data=data, is_last=bool(closing))
        if not await insisting(partial(self._store.add_events, self._record, self._run, run)):
            raise SupersededError
        self._run += 1
        self._event += data.count(END_OF_EVENT)
        self.kept_bytes += len(data)

    # -- as the delivery's reader --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._size < MAX_UNKEPT_BYTES

    def say(self, choice: Choice, text: str, token_ids: Sequence[int]) -> None:
        self._metrics.went_on(choice)
        self._add(self.writing.text(choice, text))

    def take(self, choice: Choice, piece: Piece) -> None:
        self._metrics.took(choice, piece)
        self._add(self.writing.event(choice, piece))

    def pause(self) -> None:
        """No-op: `write` is called periodically."""

    def ended(self, error: Exception | None) -> None:
        settle(self.over, error)

    def _add(self, data: bytes) -> None:
        if data:
            self._has_said = True
            self._metrics.sending()
            self._parts.append(data)
            self._size += len(data)
