"""The watchdog of a gateway's event loop: a stuck gateway leaves its shared port, where it would still get connections.

A second thread sees it. A process that was stopped as a whole has no such thread: `baton up`, a probe or a person ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger("baton.gateway")

STANDS_AFTER_S = 2.0
BEAT_S = 0.25
LINES = 3  # stack frames in the log


class Standstill:
    """Calls `leave` in a thread once the loop has not run for a while, and `back` in the loop as soon as it runs again."""

    def __init__(self, leave: Callable[[], None], back: Callable[[], None], *, after_s: float = STANDS_AFTER_S) -> None:
        self._leave = leave
        self._back = back
        self._after_s = after_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="standstill", daemon=True)

    def __enter__(self) -> Standstill:
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _beat(self) -> None:
        self._moved_at = time.monotonic()
        if not self._over.is_set():
            self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            was_stopped, looked_at = (
                now - looked_at > self._after_s / 2,
                now,
            )  # this thread sleeps, too, so the loop gets the GIL
            if was_stopped:
                self._moved_at = max(self._moved_at, now - self._after_s / 2)
            elif now - self._moved_at > self._after_s:
                self._stands(now)

    def _stands(self, now: float) -> None:
        """Leave, and wait until the loop runs again."""
        frame = sys._current_frames().get(self._loop_thread)
        where = traceback.format_stack(frame)[-LINES:] if frame is not None else []
        log.error("gateway.stands_still", extra={"for_s": round(now - self._moved_at, 1), "where": "".join(where)})
        self._leave()
        with contextlib.suppress(RuntimeError):  # the loop was closed
            # Runs before the loop polls its sockets: polling one that has left would be an error.
            self._loop.call_soon_threadsafe(self._back)
        stood_at = self._moved_at
        while self._moved_at == stood_at and not self._over.wait(BEAT_S):
            pass
