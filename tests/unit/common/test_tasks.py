"""Work that swallows a cancellation still ends in time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from common.tasks import Deadlines, Ready, in_time


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


async def test_one_timer_ends_what_is_due_and_nothing_else() -> None:
    loop, deadlines = asyncio.get_running_loop(), Deadlines()
    late, soon, done, left, later = (loop.create_future() for _ in range(5))
    deadlines.add(late, 3600)
    for future, seconds in ((later, 0.002), (soon, 0.001), (done, 0.001), (left, 0.001)):
        deadlines.add(future, seconds)
    done.set_result("in time")
    left.cancel()
    for future in (soon, later):
        with pytest.raises(TimeoutError):
            await future
    assert await done == "in time"
    assert left.cancelled()
    assert not late.done()
    deadlines.add(soon_again := loop.create_future(), 0)  # comes before the one that the timer is set for
    with pytest.raises(TimeoutError):
        await soon_again
    assert not late.done()


async def test_what_is_ready_needs_no_turn_of_the_loop() -> None:
    async def waiting() -> int:
        return await Ready(7)

    with pytest.raises(StopIteration) as ended:
        waiting().send(None)
    assert ended.value.value == 7
