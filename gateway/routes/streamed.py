"""An answer on its way to a socket: the pieces of each loop turn as its dialect's events, in one write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from common.errors import ServingError
from gateway.answers.answer import Answer, Delivery
from gateway.answers.choice import Choice, Piece
from gateway.dialects.dialect import Events
from gateway.http.problem import INTERNAL, problem_of
from gateway.http.request_scope import BodyWriter
from gateway.observe.metrics import AnswerMetrics

log = logging.getLogger("baton.http")

IDLE_EVENT_S = 10.0  # idle time before an event, up to twice this


class StreamedAnswer:
    """A reader of an answer for its client. While the client doesn't read, tokens stay in the mailbox as numbers."""

    __slots__ = (
        "_answer",
        "_delivery",
        "_events",
        "_idle_event",
        "_is_quiet",
        "_keep",
        "_metrics",
        "_parts",
        "_timer",
        "_waiting",
        "_writer",
        "takes_text",
    )

    def __init__(
        self,
        events: Events,
        answer: Answer,
        metrics: AnswerMetrics,
        idle_event: bytes = b"",
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`keep` is called after all tokens, and awaited before the end."""
        self._keep = keep
        self._answer = answer
        self._metrics = metrics
        self._events = events
        self.takes_text = self._events.tell_text_alone
        self._parts = [self._events.opening()]
        self._writer: BodyWriter | None = None
        self._delivery: Delivery | None = None
        self._waiting: asyncio.Task[None] | None = None  # waits for a slow client
        self._idle_event = idle_event
        self._is_quiet = False  # nothing was written since the timer was set
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, writer: BodyWriter) -> None:
        """Write the stream's opening, and then each token as it comes."""
        self._writer = writer
        self.pause()
        if self._idle_event:
            self._watch()
        self._delivery = self._answer.deliver(self)

    def close(self) -> None:
        """Release the answer: the connection is done with it."""
        self._stop_watching()
        if self._delivery is not None:
            self._delivery.stop()
        if self._waiting is not None:
            self._waiting.cancel()
        self._answer.cancel("client disconnected")
        self._metrics.ended()  # no-op if it was counted already

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
            self._is_quiet = False
            writer.write(parts[0] if len(parts) == 1 else b"".join(parts))
            parts.clear()
            if not writer.is_read:
                self._waiting = asyncio.create_task(self._until_read(writer))

    def ended(self, error: Exception | None) -> None:
        self._stop_watching()
        if error is None and self._keep is not None:
            self._waiting = asyncio.create_task(self._end_kept(self._keep))
        else:
            self._write_end(error)

    async def _end_kept(self, keep: Callable[[], Awaitable[None]]) -> None:
        """Store the answer before its end is sent: its client may refer to it at once."""
        try:
            await keep()
        except Exception as error:
            self._write_end(error)
        else:
            self._write_end(None)

    def _write_end(self, error: Exception | None) -> None:
        assert self._writer is not None
        self._parts.append(self._end(error))
        self._writer.end(b"".join(self._parts))

    def _end(self, error: Exception | None) -> bytes:
        """Write the end; an error becomes an event."""
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

    def _watch(self) -> None:
        """Write idle events, where a client or proxy would take silence for an end."""
        assert self._writer is not None
        if self._is_quiet and self.is_ready:
            self._writer.write(self._idle_event)
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(IDLE_EVENT_S, self._watch)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _until_read(self, writer: BodyWriter) -> None:
        await writer.read()
        self._waiting = None
        if self._delivery is not None:
            self._delivery.wake()
