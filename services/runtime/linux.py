"""Linux' own means for processes: parents, orphans and names."""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Among the fields of /proc/self/stat behind the name, followed by where they end.
_ARG_START = 45
# Loaded before any fork: between fork and exec no lock may be taken.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Let this process get SIGTERM when its parent dies. May be called between fork and exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> bool:
    """Become the parent of this process's descendants whose own parent ends; whether the system has that."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def leave_orphans() -> None:
    """Adopt no more: who ends later is the system's to wait for. Those that were adopted stay children."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def be_called(arguments: list[str]) -> None:
    """Show these arguments where `ps` looks, as far as there is room: the memory of those that this process began with."""
    if _LIBC is None:
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
    shown = "\0".join(arguments).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
