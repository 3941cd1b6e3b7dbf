"""Cancelling tasks, timing out futures, and awaitables that are ready."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended: Python 3.11's `wait_for` can swallow a cancellation."""
    ending = set(tasks)
    while ending:
        for task in ending:
            task.cancel()
        ended, ending = await asyncio.wait(ending, timeout=1.0)
        await asyncio.gather(*ended, return_exceptions=True)  # their outcomes don't matter


async def in_time(work: Coroutine[Any, Any, Result], seconds: float) -> Result:
    """Return the result of `work`; raise TimeoutError in time even if it swallows a cancellation."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return await task
        raise TimeoutError
    finally:
        await cancel_all([task])


class Ready(Generic[Result]):
    """An awaitable whose value is already known."""

    __slots__ = ("result",)

    def __init__(self, result: Result) -> None:
        self.result = result

    def __await__(self) -> Generator[Any, None, Result]:
        return self.result
        yield


class Deadlines:
    """One timer for the timeouts of many futures."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, asyncio.Future[Any]]] = []  # a heap
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, future: asyncio.Future[Any], seconds: float) -> None:
        """Set TimeoutError on the future if it is not done in time."""
        loop = asyncio.get_running_loop()
        entry = loop.time() + seconds, next(self._numbers), future
        heappush(self._due, entry)
        if self._due[0] is entry:
            self._look_at(loop, entry[0])

    def _look_at(self, loop: asyncio.AbstractEventLoop, instant: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(instant, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now = None, loop.time()
        while self._due and (self._due[0][0] <= now or self._due[0][2].done()):
            _, _, future = heappop(self._due)
            if not future.done():
                future.set_exception(TimeoutError())
        if self._due:
            self._look_at(loop, self._due[0][0])
