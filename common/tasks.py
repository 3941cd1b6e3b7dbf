"""The end of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

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
    """What `work` returns; TimeoutError after so long, also if it swallows a cancellation."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return await task
        raise TimeoutError
    finally:
        await cancel_all([task])
