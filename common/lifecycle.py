"""Signals to drain by, and the end of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterable
from typing import Any


@contextlib.asynccontextmanager
async def until_signalled() -> AsyncIterator[asyncio.Event]:
    """Yield an event that SIGINT and SIGTERM set. A second signal ends the process at once."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    try:
        yield stopping
    finally:
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended, however they did: Python 3.11's `wait_for` swallows what comes with its result."""
    ending = set(tasks)
    while ending:
        for task in ending:
            task.cancel()
        ended, ending = await asyncio.wait(ending, timeout=1.0)
        await asyncio.gather(*ended, return_exceptions=True)  # nobody else asks how they did
