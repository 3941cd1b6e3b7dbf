"""Memory that a process no longer needs."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Return freed memory to the system: glibc keeps it in each thread's arena, hundreds of MB after weights were loaded."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
