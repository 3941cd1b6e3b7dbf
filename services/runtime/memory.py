"""Memory after start-up: loaded objects leave the garbage collector, and freed memory goes back to the system.

A full collection walks all 85,000 containers of a gateway (a worker: 250,000) and stops its streams for 60 (140) ms on a
slow core. Collections while modules are imported take a fifth of that time and find nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

YOUNG = 10_000  # allocations between two young collections


# Optional imports of packages that no service uses: the Redis client's of OpenTelemetry's metrics, and the NATS client's of
# aiohttp, for WebSockets: 9 MB of a process, and a quarter of a second of its start.
UNUSED = ("opentelemetry.sdk.metrics", "aiohttp")


@contextlib.contextmanager
def importing(*unused: str) -> Iterator[None]:
    """Context manager for imports that stay for good: later collections skip them.

    Packages see neither `UNUSED` nor `unused` there, as if they were not installed; afterwards both can be imported.
    """
    hidden = [name for name in (*UNUSED, *unused) if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: an ImportError, as Python defines
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        gc.enable()


def keep_what_is_loaded() -> None:
    """Freeze all loaded objects, once: later collections see only newer ones."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    give_back()


def give_back() -> None:
    """Return freed memory to the system: glibc keeps it in each thread's arena, hundreds of MB after loading weights."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
