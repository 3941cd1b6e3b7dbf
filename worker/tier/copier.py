"""The thread that copies between device and host while passes run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeVar

log = logging.getLogger("baton.tier")

T = TypeVar("T")
Copy = Callable[[], T]
Over = Callable[[T | Exception], None]

CLOSE_S = 5.0  # a copy that takes longer is left behind: the process ends
# Time for a copy and those before it in the queue: a prompt waits no longer for what it may as well compute.
COPY_S, COPY_BYTES_PER_S = 5.0, 256e6
RATE_SMOOTHING, LEAST_S = 0.2, 1e-6


class Copier(Protocol):
    """Copies in the order of `submit`. Both functions are called on the thread that submits.

    `over` gets the result or the error. `late` is called before it where that takes more than so many seconds; until `over`
    the copy may still write.
    """

    def submit(self, copy: Copy[T], over: Over[T], *, late: Callable[[], None], within_s: float) -> None: ...

    def close(self) -> bool:
        """End; False if a copy hangs."""


class Copies:
    """The copies of a thread, with a bound on the time of each. None should begin while `are_late`: it would stand behind."""

    def __init__(self, copier: Copier) -> None:
        self.failed = 0  # late, or ended by an error
        self.bytes_per_s = 0.0  # mean of those that a prompt waited for; 0: none
        self._copier = copier
        self._late = 0

    @property
    def are_late(self) -> bool:
        return self._late > 0

    def submit(
        self, copy: Copy[T], over: Over[T], *, num_bytes: float, given_up: Callable[[], None] | None = None
    ) -> None:
        """Submit a copy; a prompt waits for it where it may be `given_up`.

        Nobody waits for one that is late, but what it reads and writes stays its own until it lands.
        """
        is_late, began = False, time.perf_counter()

        def late() -> None:
            nonlocal is_late
            is_late = True
            self._late += 1
            self.failed += 1
            log.warning("tier.copy_late", extra={"memory_mb": int(num_bytes) >> 20})
            if given_up is not None:
                given_up()

        def landed(result: T | Exception) -> None:
            if given_up is not None and not isinstance(result, Exception):
                rate = num_bytes / max(time.perf_counter() - began, LEAST_S)
                self.bytes_per_s += (RATE_SMOOTHING if self.bytes_per_s else 1) * (rate - self.bytes_per_s)
            self._late -= is_late
            self.failed += isinstance(result, Exception) and not is_late
            over(result)

        self._copier.submit(copy, landed, late=late, within_s=COPY_S + num_bytes / COPY_BYTES_PER_S)

    def close(self) -> bool:
        """End; False if a copy hangs."""
        return self._copier.close()


class CopyThread:
    """One thread; `over` and `late` run on the event loop that submits."""

    def __init__(self, name: str = "kv-host", *, close_s: float = CLOSE_S) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False
        self._close_s = close_s
        # A daemon: the interpreter waits for all others when it ends, and a copy may hang.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: Copy[T], over: Over[T], *, late: Callable[[], None], within_s: float) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(within_s, late)

        def landed(result: T | Exception) -> None:
            timer.cancel()
            over(result)

        self._waiting.put(partial(_run, copy, partial(_tell, loop, landed)))

    def close(self) -> bool:
        """Wait for the copy that began, unless it hangs, and drop the others."""
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            log.warning("tier.copy_hangs", extra={"copier": self._thread.name})
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None and not self._is_closed:
            task()


def _run(copy: Copy[T], over: Over[T]) -> None:
    try:
        result: T | Exception = copy()
    except Exception as error:
        result = error
    except BaseException as error:  # else nobody would hear of it
        result = RuntimeError(repr(error))
    over(result)


def _tell(loop: asyncio.AbstractEventLoop, landed: Over[T], result: T | Exception) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(landed, result)
