"""Tasks of which only so many run at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

Start = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]


@contextlib.asynccontextmanager
async def bounded(most: int) -> AsyncIterator[Start]:
    """Context manager with a function that waits for one of `most` places, then starts a task. It ends with all tasks.

    Raises the first task's error as it is, and cancels the others.
    """
    places = asyncio.Semaphore(most)
    try:
        async with asyncio.TaskGroup() as tasks:

            async def start(coroutine: Coroutine[Any, Any, None]) -> None:
                try:
                    await places.acquire()
                except BaseException:
                    coroutine.close()
                    raise
                tasks.create_task(coroutine).add_done_callback(lambda _: places.release())

            yield start
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
