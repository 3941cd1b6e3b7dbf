"""The end of tasks."""

from __future__ import annotations

import asyncio

from common.tasks import cancel_all


async def test_all_have_ended_however_they_did_when_cancel_all_returns() -> None:
    ended: list[str] = []

    async def run(name: str, *, fails: bool = False) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up takes a turn of the loop
            ended.append(name)
            if fails:
                raise ValueError(name)

    tasks = {asyncio.create_task(run("one")), asyncio.create_task(run("two", fails=True))}
    for task in tasks:
        task.add_done_callback(tasks.discard)
    await asyncio.sleep(0)
    await cancel_all(tasks)
    assert sorted(ended) == ["one", "two"]
    assert tasks == set()
    await cancel_all(tasks)


async def test_who_swallows_a_cancellation_is_cancelled_again() -> None:
    """As Python 3.11's `asyncio.wait_for` does when its result comes at that moment: a worker's loop went on for ever."""
    swallowed = asyncio.Event()

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    await cancel_all({task})
    assert swallowed.is_set()
    assert task.cancelled()
