"""An answer on its way to a socket: each turn's pieces as its dialect's events, in one write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from common.errors import ServingError
from gateway.answers.answer import Answer, Delivery
from gateway.answers.choice import Choice, Piece
from gateway.dialects.table import Entry
from gateway.http.problem import INTERNAL, problem_of
from gateway.http.request_scope import BodyWriter
from gateway.observe.metrics import AnswerMetrics

log = logging.getLogger("baton.http")


class StreamedAnswer:
    """Reads an answer for its client. While that one doesn't read, tokens wait where they are: as numbers."""

    __slots__ = (
        "_answer",
        "_delivery",
        "_events",
        "_metrics",
        "_parts",
        "_waiting",
        "_writer",
        "takes_text",
    )

    def __init__(self, entry: Entry, body: Any, answer: Answer, metrics: AnswerMetrics) -> None:
        self._answer = answer
        self._metrics = metrics
        self._events = entry.endpoint.events(body, answer)
        self.takes_text = self._events.tell_text_alone
        self._parts = [self._events.opening()]
        self._writer: BodyWriter | None = None
        self._delivery: Delivery | None = None
        self._waiting: asyncio.Task[None] | None = None  # the client doesn't read

    def begin(self, writer: BodyWriter) -> None:
        """Write the stream's beginning, and each token as it comes."""
        self._writer = writer
        self.pause()
        self._delivery = self._answer.deliver(self)

    def close(self) -> None:
        """The connection is through with it."""
        if self._delivery is not None:
            self._delivery.stop()
        if self._waiting is not None:
            self._waiting.cancel()
        self._answer.cancel("client disconnected")
        self._metrics.ended()  # unless it was counted already

    # -- as the delivery's reader --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._waiting is None

    def say(self, choice: Choice, text: str, token_ids: Sequence[int]) -> None:
        self._metrics.went_on(choice)
        self._metrics.sending()
        self._parts.append(self._events.text(choice, text))

    def take(self, choice: Choice, piece: Piece) -> None:
        self._metrics.took(choice, piece)
        data = self._events.event(choice, piece)
        if data:
            self._metrics.sending()
            self._parts.append(data)

    def pause(self) -> None:
        writer, parts = self._writer, self._parts
        assert writer is not None
        if parts:
            writer.write(parts[0] if len(parts) == 1 else b"".join(parts))
            parts.clear()
            if not writer.is_read:
                self._waiting = asyncio.create_task(self._until_read(writer))

    def ended(self, error: Exception | None) -> None:
        assert self._writer is not None
        self._parts.append(self._end(error))
        self._writer.end(b"".join(self._parts))

    def _end(self, error: Exception | None) -> bytes:
        """An error within a stream is written into it."""
        if error is None:
            self._metrics.ended()
            return self._events.closing()
        if isinstance(error, ServingError):
            self._metrics.failed(error.code)
            log.warning("http.stream_failed", extra={"answer": self._answer.id, "code": error.code})
            return self._events.failed(problem_of(error))
        self._metrics.failed(INTERNAL.code)
        log.error("http.stream_crashed", extra={"answer": self._answer.id}, exc_info=error)
        return self._events.failed(INTERNAL)

    async def _until_read(self, writer: BodyWriter) -> None:
        await writer.read()
        self._waiting = None
        if self._delivery is not None:
            self._delivery.wake()
