"""Work that swallows a cancellation still ends in time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from common.tasks import in_time


async def test_what_swallows_a_cancellation_ends_in_time_all_the_same() -> None:
    """As nats' client does, through Python 3.11's `wait_for`: it went on connecting for ever."""
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 2:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            swallowed += 1
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await in_time(stubborn(), 0.01)
    assert swallowed == 2


async def test_results_and_errors_come_through() -> None:
    async def answer() -> int:
        return 7

    async def fail() -> None:
        raise ValueError("no")

    assert await in_time(answer(), 5) == 7
    with pytest.raises(ValueError, match="no"):
        await in_time(fail(), 5)
