"""Shutdown with a deadline: a signalled process exits in time even if a task hangs."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator

log = logging.getLogger("baton.leaving")

LEAVE_S = 15.0  # after the grace: give back blocks, leave the registry, disconnect


@contextlib.asynccontextmanager
async def until_signalled() -> AsyncIterator[asyncio.Event]:
    """Context manager: yields an event that SIGINT and SIGTERM set. A second signal exits at once; children die with us."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)
            # An exception would run into what is being closed, and show that instead.
            signal.signal(name, lambda number, _: os._exit(128 + number))

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    try:
        yield stopping
    finally:
        for name, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            loop.remove_signal_handler(name)
            signal.signal(name, usual)


@contextlib.contextmanager
def parked_by_signals(ask: Callable[[bool], None]) -> Iterator[None]:
    """Context manager: SIGUSR1 calls `ask(True)`, to sleep, and SIGUSR2 `ask(False)`, to wake."""
    loop, words = asyncio.get_running_loop(), {signal.SIGUSR1: True, signal.SIGUSR2: False}
    for name, sleeps in words.items():
        loop.add_signal_handler(name, ask, sleeps)
    try:
        yield
    finally:
        for name in words:
            loop.remove_signal_handler(name)
            signal.signal(name, signal.SIG_IGN)  # the default would end the process


@contextlib.asynccontextmanager
async def ending_in_time(stopping: asyncio.Event, grace_s: float, *, leave_s: float = LEAVE_S) -> AsyncIterator[None]:
    """Context manager: once `stopping` is set, exit after `grace_s + leave_s` with code 1 and all threads' stacks on stderr.

    Half of `leave_s` before, a line for each remaining asyncio task says what it waits for.
    """
    watching = asyncio.create_task(_watch(stopping, grace_s, leave_s))
    try:
        yield
    finally:
        watching.cancel()


async def _watch(stopping: asyncio.Event, grace_s: float, leave_s: float) -> None:
    await stopping.wait()
    # A separate thread works even when the event loop is stuck.
    faulthandler.dump_traceback_later(grace_s + leave_s, exit=True)
    await asyncio.sleep(grace_s + leave_s / 2)
    for task in asyncio.all_tasks():
        frames = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in task.get_stack(limit=8)]
        log.warning("process.still_here", extra={"task": task.get_name(), "stack": " ".join(frames)})
