"""Waiting for what comes soon, with a limit."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from common.bus import NatsSettings, connect_bus
from common.errors import UnavailableError

T = TypeVar("T")

LIMIT_S = 60.0  # far above what anything here takes: only a failure waits this long


async def eventually(look: Callable[[], Awaitable[T]], limit_s: float = LIMIT_S) -> T:
    """Look until the result is true and return it; raise TimeoutError after `limit_s`. For what announces itself by no event."""
    async with asyncio.timeout(limit_s):
        while True:
            result = await look()
            if result:
                return result
            await asyncio.sleep(0.02)


async def refusal(settings: NatsSettings, match: str) -> str:
    """Why NATS lets nobody in: the words with `match` in them. A client tries until its time is up, here longer and longer."""
    for limit_s in (0.5, 5.0, LIMIT_S):
        with pytest.raises(UnavailableError) as refused:
            async with connect_bus(dataclasses.replace(settings, connect_timeout_s=limit_s), name="stranger"):
                pass
        if re.search(match, str(refused.value)):
            return str(refused.value)
    raise AssertionError(str(refused.value))
