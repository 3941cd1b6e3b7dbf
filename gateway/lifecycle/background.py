"""Tasks that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any

from common.tasks import Ready

log = logging.getLogger("baton.requests")


class Background:
    """Keeps tasks until they end, and logs those that fail."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def see_to(self, work: Awaitable[Any]) -> None:
        """A task for what is not done already."""
        if not isinstance(work, Ready):
            self.spawn(_awaited(work))

    async def settle(self, timeout_s: float) -> None:
        """Wait until the current tasks have ended, up to a time limit."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("request.task_failed", exc_info=task.exception())


async def _awaited(work: Awaitable[Any]) -> None:
    await work
