"""An event loop without a clock of its own: when nothing is left to do now, it is the time of the next timer.

`Process` stands for an operating system's process: everything that its tasks start belongs to it, and when it is killed
nothing of it runs any more, not even a `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any

MOST_CALLBACKS = 100_000  # of a whole run: more are a loop that never ends

_process: ContextVar[Process | None] = ContextVar("process", default=None)


class EndlessError(Exception):
    """There is always something to do."""


class Process:
    """Whose code runs: found through the context that asyncio hands on to every task and timer."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.context = copy_context()
        self._loop = loop
        self.context.run(_process.set, self)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of this process."""
        return self._loop.create_task(coroutine, context=self.context.copy())

    def at(self, delay_s: float, action: Callable[..., object], *arguments: object) -> None:
        """Call `action` in this process some time from now; never if it is dead then."""
        self._loop.call_later(delay_s, action, *arguments, context=self.context.copy())

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their times, those of one instant in the order in which they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.callbacks = 0
        self.executor_delay: Callable[[], float] = lambda: 0.0  # how long work in a thread takes
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = count()
        self._started: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        return self.now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Work of other threads happens at once, at the end of the time that it takes."""
        result = self.create_future()

        def work() -> None:
            if result.done():
                return
            try:
                result.set_result(func(*args))
            except Exception as error:
                result.set_exception(error)

        self.call_later(self.executor_delay(), work)
        return result

    def abandon(self) -> None:
        """The world ends: close what still waits, in silence. Nothing runs afterwards."""
        self._timers.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of tasks that did not even begin
            for task in self._started:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()  # type: ignore[union-attr]
        self._started.clear()
        self._ready.clear()  # type: ignore[attr-defined]
        self.close()

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        self._started.append(task)
        return task

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        if not ready:
            when, _, handle = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_process)
            if process is None or process.alive:
                self.callbacks += 1
                handle._run()
        if self.callbacks > MOST_CALLBACKS:
            raise EndlessError("the run goes on for ever")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when their time comes."""


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` in a loop of its own, where waiting takes no time."""
    loop = VirtualLoop()
    with monotonic_is(loop):
        try:
            loop.run_until_complete(main)
        finally:
            loop.abandon()


@contextlib.contextmanager
def monotonic_is(loop: VirtualLoop) -> Iterator[None]:
    """`time.monotonic()` is the loop's time meanwhile."""
    real, time.monotonic = time.monotonic, loop.time
    try:
        yield
    finally:
        time.monotonic = real
