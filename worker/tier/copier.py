"""The thread that copies between device and host while passes run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

Copy = Callable[[], bytes]
Over = Callable[[bytes | Exception], None]


class Copier(Protocol):
    """Copies in the order of `submit`. `over` gets the digests or the error, on the thread that submits."""

    def submit(self, copy: Copy, over: Over) -> None: ...

    def close(self) -> None: ...


class CopyThread:
    """One thread; `over` runs on the event loop that submits."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-host")

    def submit(self, copy: Copy, over: Over) -> None:
        loop = asyncio.get_running_loop()

        def landed(future: Future[bytes]) -> None:
            if future.cancelled() or loop.is_closed():
                return
            error = future.exception()
            result = error if isinstance(error, Exception) else future.result()
            loop.call_soon_threadsafe(over, result)

        self._thread.submit(copy).add_done_callback(landed)

    def close(self) -> None:
        """Wait for the copies that began, and drop the others."""
        self._thread.shutdown(wait=True, cancel_futures=True)
