"""An answer's pieces for an awaiting task, one event-loop turn at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gateway.answers.choice import Choice, Piece
from gateway.routes.door import Begun

Turn = dict[int, Piece]  # by index of the choice


class Pieces:
    """The answer's reader. While its task writes, further tokens stay in the mailbox as numbers."""

    takes_text = False

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self._taken: Turn = {}
        self._news = asyncio.Event()
        self._is_over = False
        self._error: Exception | None = None

    async def turns(self) -> AsyncGenerator[Turn, None]:
        """The pieces of each turn. Raises the error that ended the answer."""
        delivery = self._begun.answer.deliver(self)
        try:
            while not self._is_over or self._taken:
                await self._news.wait()
                self._news.clear()
                taken, self._taken = self._taken, {}
                if taken:
                    self._begun.metrics.sending()
                    yield taken
                delivery.wake()
            if self._error is not None:
                raise self._error
        finally:
            delivery.stop()

    # -- as the delivery's reader --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return not self._taken

    def say(self, choice: Choice, text: str, token_ids: Sequence[int]) -> None:
        self.take(choice, Piece(text=text, token_ids=list(token_ids)))

    def take(self, choice: Choice, piece: Piece) -> None:
        self._begun.metrics.took(choice, piece)
        if choice.index in self._taken:
            self._taken[choice.index].add(piece)
        else:
            self._taken[choice.index] = piece

    def pause(self) -> None:
        self._news.set()

    def ended(self, error: Exception | None) -> None:
        self._is_over, self._error = True, error
        self._news.set()
