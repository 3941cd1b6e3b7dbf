"""One UCX worker driven by an event loop, without threads.

The binding's own coroutines poll each turn of the loop for as long as a message may come, which keeps an idle loop busy.
Here an idle worker sleeps on UCX's file descriptor. While blocks move, the loop's thread drives UCX itself: it is held for
`hold_s` at most, then takes turns with everything else.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
os.environ.setdefault("UCX_TCP_USER_TIMEOUT", "3s")  # read by UCX when ucxx is loaded
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")

import ucxx._lib.libucxx as api
from ucxx._lib.arr import Array
from ucxx.types import Tag

# A wait polls at each turn of the loop for as long as an ordinary push takes, then waits for events or `LOOK_S`.
POLLING_S = 0.005
LOOK_S = 0.001
TURN_S = 0.0002  # longest hold of the loop's thread in one turn
IDLE_LOOK_S = 0.05  # some of UCX's transports have no events
ABORT_NS = 10**9  # longest wait for an endpoint to close


class Wire:
    """A UCX worker, and the tasks that await its requests."""

    def __init__(self, *, hold_s: float, loopback_only: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        # UCX signals events on each device that it may use.
        options = {"NET_DEVICES": "lo"} if loopback_only and "UCX_NET_DEVICES" not in os.environ else {}
        self._worker = api.UCXWorker(
            api.UCXContext(options), enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self._file = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._file, self._look)
        self._news = asyncio.Event()
        self._hold_s, self._hold_until = hold_s, 0.0
        self._polling = 0  # active callers of `until`
        self._looking: asyncio.Handle | None = None
        self._moved = False  # progress since the last wake-up
        self._tick()

    def listen(self, accept: Callable[[Any], None]) -> Any:
        """Return a listener (`port`) that calls `accept` with each new endpoint until it is dropped."""
        return api.UCXListener.create(self._worker, 0, accept, deliver_endpoint=True)

    def connect(self, host: str, port: int) -> Any:
        """Return an endpoint at once, before the peer answers."""
        return api.UCXEndpoint.create(self._worker, host, port, True)

    def progress(self) -> bool:
        """Let UCX make progress; return True if it did anything."""
        moved: bool = self._worker.progress_once()
        self._moved |= moved
        return moved

    def hold(self) -> None:
        """Let waits hold the loop's thread for `hold_s` from now on: blocks are about to move."""
        self._hold_until = time.perf_counter() + self._hold_s

    async def until(self, ready: Callable[[], bool], *, settle: Callable[[], None] = lambda: None) -> None:
        """Drive UCX until `ready` is true, which is expected soon.

        `settle` ends what the caller has begun; it is called before anything else may run.
        """
        if ready():
            return
        polling_until = time.perf_counter() + (POLLING_S if self._hold_s else 0.0)
        self._polling += 1
        try:
            while not ready():
                self.progress()
                now = time.perf_counter()
                if now < self._hold_until:
                    continue
                settle()
                if now < polling_until:
                    if self._moved:
                        self._tell()
                    await asyncio.sleep(0)
                    if self._polling == 1:  # several callers take turns
                        self._hold_until = time.perf_counter() + min(TURN_S, self._hold_s)
                elif not ready():
                    await self._news_within(LOOK_S)
        finally:
            self._polling -= 1
            self._look_soon()

    async def end(self, endpoint: Any, request: Any, *, settle: Callable[[], None] = lambda: None) -> None:
        """Wait for a request that will end soon. Raises UCX's error, ConnectionError if the peer is gone."""
        await self.until(lambda: request.completed or not endpoint.alive, settle=settle)
        check(endpoint, request)

    async def idle(self, endpoint: Any, request: Any) -> None:
        """Wait for a request that may take hours. Raises UCX's error, ConnectionError if the peer is gone."""
        self._look_soon()
        while not request.completed and endpoint.alive:
            await self._news.wait()
        check(endpoint, request)

    async def _news_within(self, timeout_s: float) -> None:
        timer = self._loop.call_later(timeout_s, self._tell)
        self._polling -= 1
        try:
            self._look_soon()
            await self._news.wait()
        finally:
            self._polling += 1
            timer.cancel()

    def _look_soon(self) -> None:
        """Check again at the loop's next turn: UCX must be armed after its last progress to report events."""
        if self._looking is None:
            self._looking = self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Wake the waiting tasks, and ask UCX for the next event. Does nothing while a task polls.

        That task wakes others itself; arming would put a call of the host between a GPU's copies.
        """
        self._looking = None
        if self._polling:
            return
        for _ in range(64):
            if not self.progress():
                break
        if self._moved:
            self._tell()
        if not self._worker.arm():
            self._look_soon()

    def _tell(self) -> None:
        self._moved = False
        self._news.set()
        self._news.clear()

    def _tick(self) -> None:
        self._moved = True  # an endpoint can end without progress
        self._look_soon()
        self._timer = self._loop.call_later(IDLE_LOOK_S, self._tick)

    def close(self) -> None:
        """Stop listening; all endpoints were aborted before."""
        self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._loop.remove_reader(self._file)


def check(endpoint: Any, request: Any) -> None:
    """Raise the error of a request, or of its endpoint if it ended first."""
    if request.completed:
        request.check_error()
    else:
        endpoint.raise_on_error()
        raise ConnectionError("the peer is gone")


def abort(endpoint: Any) -> None:
    """Drop an endpoint with all that is in flight on it. Blocks for `ABORT_NS` at most."""
    endpoint.close_blocking(period=ABORT_NS, max_attempts=1)


__all__ = ["Array", "Tag", "Wire", "abort", "check"]
