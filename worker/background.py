"""Background tasks: an exception in one is logged, never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from common.errors import UnavailableError

log = logging.getLogger("baton.worker")


class Background:
    """Tasks of a worker that nobody awaits."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return list(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine as a background task."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("worker.task_failed", exc_info=task.exception())


async def every(period_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Repeat `action` until cancelled, logging whatever it raises."""
    while True:
        try:
            await action()
        except UnavailableError as error:
            log.debug("worker.unavailable", extra={"action": action.__name__, "error": error.message})
        except Exception:
            log.exception("worker.loop_failed", extra={"action": action.__name__})
        await asyncio.sleep(period_s)
