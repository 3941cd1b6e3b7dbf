"""Waiting for what comes soon, with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 15.0  # far above what anything here takes: only a failure waits this long


async def eventually(look: Callable[[], Awaitable[T]], limit_s: float = LIMIT_S) -> T:
    """Look until the result is true and return it; raise TimeoutError after `limit_s`. For what announces itself by no event."""
    async with asyncio.timeout(limit_s):
        while True:
            result = await look()
            if result:
                return result
            await asyncio.sleep(0.02)
