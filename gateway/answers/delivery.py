"""From token events to an answer's reader: once a turn of the event loop, all that came in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Protocol

from gateway.answers.choice import Choice, Piece
from gateway.request.timeline import STOP_STRING

log = logging.getLogger("baton.answers")

MAX_TOKENS = 64  # of a choice in a turn; then other answers have theirs


class Reader(Protocol):
    """Whoever gets an answer's pieces. What it raises ends the answer with that error."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes pieces now; if not, it calls `Delivery.wake` once it does."""
        ...

    def take(self, choice: Choice, piece: Piece) -> None:
        """The next piece of a choice: all its new tokens of this turn, or the first of them."""
        ...

    def pause(self) -> None:
        """That was all for this turn."""
        ...

    def ended(self, error: Exception | None) -> None:
        """Nothing more comes. Called once, instead of the last `pause`."""
        ...


class Turn:
    """Callbacks for the end of this turn of the event loop: workers' frames that came in it are read by then."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def add(self, callback: Callable[[], None]) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._end)
        self._due.append(callback)

    def _end(self) -> None:
        due, self._due = self._due, []
        for callback in due:
            callback()


class Delivery:
    """Gives the pieces of all choices to one reader, until they have ended, one failed, or nobody reads any more."""

    def __init__(self, choices: Sequence[Choice], reader: Reader, turn: Turn, close: Callable[[], None]) -> None:
        """`close` is called before the reader hears of the end."""
        self._open = list(choices)
        self._reader = reader
        self._turn = turn
        self._close = close
        self._is_due = self._is_over = False
        self._context = copy_context()  # the reader's trace, not that of a worker's frame

    def begin(self) -> None:
        """Hear of what the choices say."""
        for choice in self._open:
            choice.generation.mailbox.listen(self.wake)

    def wake(self) -> None:
        """There may be something to read."""
        if not self._is_due:
            self._is_due = True
            self._turn.add(self._run)

    def stop(self) -> None:
        """The reader hears nothing more."""
        self._is_over = True

    def _run(self) -> None:
        self._is_due = False
        if not self._is_over:
            self._context.run(self._deliver)

    def _deliver(self) -> None:
        reader = self._reader
        try:
            if not reader.is_ready:
                return
            for choice in tuple(self._open):
                self._read(choice)
            if self._open:
                reader.pause()
                return
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _read(self, choice: Choice) -> None:
        """Raises what ends the answer."""
        generation = choice.generation
        event = generation.mailbox.take(MAX_TOKENS)
        if event is not None:
            piece = choice.take(event)
            self._reader.take(choice, piece)
            if piece.finish:
                self._open.remove(choice)
                if not event.finish:
                    generation.cancel(STOP_STRING)
            elif len(event.token_ids) == MAX_TOKENS:
                self.wake()  # more may be there
        elif generation.mailbox.is_over:
            self._open.remove(choice)

    def _end(self, error: Exception | None) -> None:
        self._is_over = True
        self._close()
        try:
            self._reader.ended(error)
        except Exception:  # its own end: other answers of this turn must have theirs
            log.exception("answer.end_failed")
