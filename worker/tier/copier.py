"""The thread that copies between device and host while passes run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

log = logging.getLogger("baton.tier")

Copy = Callable[[], bytes]
Over = Callable[[bytes | Exception], None]

CLOSE_S = 5.0  # a copy that takes longer is left behind: the process ends


class Copier(Protocol):
    """Copies in the order of `submit`. Both functions are called on the thread that submits.

    `over` gets the digests or the error. `late` is called before it where that takes more than so many seconds; until `over`
    the copy may still write.
    """

    def submit(self, copy: Copy, over: Over, *, late: Callable[[], None], within_s: float) -> None: ...

    def close(self) -> None: ...


class CopyThread:
    """One thread; `over` and `late` run on the event loop that submits."""

    def __init__(self, name: str = "kv-host", *, close_s: float = CLOSE_S) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False
        self._close_s = close_s
        # A daemon: the interpreter waits for all others when it ends, and a copy may hang.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: Copy, over: Over, *, late: Callable[[], None], within_s: float) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(within_s, late)

        def landed(result: bytes | Exception) -> None:
            timer.cancel()
            over(result)

        self._waiting.put(partial(_run, copy, partial(_tell, loop, landed)))

    def close(self) -> None:
        """Wait for the copy that began, unless it hangs, and drop the others."""
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            log.warning("tier.copy_hangs", extra={"copier": self._thread.name})

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None and not self._is_closed:
            task()


def _run(copy: Copy, over: Over) -> None:
    try:
        result: bytes | Exception = copy()
    except Exception as error:
        result = error
    except BaseException as error:  # else nobody would hear of it
        result = RuntimeError(repr(error))
    over(result)


def _tell(loop: asyncio.AbstractEventLoop, landed: Over, result: bytes | Exception) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(landed, result)
