"""The memory of a process after its start: out of the garbage collector's sight, and nothing that only the start needed.

A full collection walks all 85,000 containers of a gateway (a worker: 250,000) and stops its streams for 60 (140) ms on a
slow core. Collections while modules are imported take a fifth of that time and find nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

YOUNG = 10_000  # new containers between two looks


# Modules that packages import where installed and Baton never uses: the Redis client imports OpenTelemetry's metrics.
UNUSED = ("opentelemetry.sdk.metrics",)


@contextlib.contextmanager
def importing(*unused: str) -> Iterator[None]:
    """Import what a process needs inside: it is kept for good, and later collections pass it by.

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
    """Call it once, when everything is loaded: later collections then see only newer objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    give_back()


def give_back() -> None:
    """Return freed memory to the system: glibc keeps it in each thread's arena, hundreds of MB after weights were loaded."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
