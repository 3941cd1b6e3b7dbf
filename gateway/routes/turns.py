"""Pacing of crowds of requests on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets one task a loop turn continue, so that streams are written in between."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # set in this turn of the loop

    async def take(self) -> None:
        """Return at once if nobody else did in this turn, else after earlier callers."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a cancelled waiter is skipped
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False
