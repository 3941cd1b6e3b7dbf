"""The copying thread: copies that hang, and errors of all kinds, are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Event

from worker.tier.copier import CopyThread

LONG_S = 60.0


class Results:
    """Awaits what the thread tells."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[object] = asyncio.Queue()

    def over(self, result: bytes | Exception) -> None:
        self.told.put_nowait(result)

    def late(self) -> None:
        self.told.put_nowait("late")

    async def next(self) -> object:
        return await asyncio.wait_for(self.told.get(), LONG_S)


def raising(error: BaseException) -> Callable[[], bytes]:
    def copy() -> bytes:
        raise error

    return copy


async def test_copies_land_in_order() -> None:
    thread, results = CopyThread(), Results()
    for number in range(3):
        thread.submit(lambda number=number: bytes([number]), results.over, late=results.late, within_s=LONG_S)
    assert [await results.next() for _ in range(3)] == [b"\0", b"\1", b"\2"]
    thread.close()


async def test_an_error_is_told_whatever_it_is() -> None:
    thread, results = CopyThread(), Results()
    error = RuntimeError("of the device")
    thread.submit(raising(error), results.over, late=results.late, within_s=LONG_S)
    thread.submit(raising(SystemExit(3)), results.over, late=results.late, within_s=LONG_S)
    assert await results.next() is error
    assert isinstance(await results.next(), RuntimeError)
    thread.close()


async def test_a_copy_that_hangs_is_late_and_lands_once_it_can() -> None:
    thread, results, may_end = CopyThread(), Results(), Event()
    thread.submit(lambda: b"ended" if may_end.wait() else b"", results.over, late=results.late, within_s=0.01)
    assert await results.next() == "late"
    may_end.set()
    assert await results.next() == b"ended"
    thread.close()


async def test_closing_leaves_a_copy_behind_that_hangs() -> None:
    thread, results, began, may_end = CopyThread(close_s=0.01), Results(), Event(), Event()

    def hanging() -> bytes:
        began.set()
        may_end.wait()
        return b"ended"

    thread.submit(hanging, results.over, late=results.late, within_s=LONG_S)
    thread.submit(lambda: b"dropped", results.over, late=results.late, within_s=LONG_S)
    await asyncio.to_thread(began.wait)
    await asyncio.to_thread(thread.close)
    may_end.set()
    assert await results.next() == b"ended"
    assert results.told.empty()
