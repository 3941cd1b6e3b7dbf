"""Linux process control: parents, orphans and names."""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Fields of /proc/self/stat after the name: start and end of the arguments.
_ARG_START = 45
# Loaded before any fork: no lock may be taken between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Make this process get SIGTERM when its parent dies. May be called between fork and exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> bool:
    """Become the subreaper of orphaned descendants; return False if the system can't."""
    return _LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def leave_orphans() -> None:
    """Stop adopting orphans: the system waits for later ones. Adopted ones stay children."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def be_called(arguments: list[str]) -> None:
    """Set the arguments that `ps` shows, as far as they fit into the memory of the original ones."""
    if _LIBC is None:
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
    shown = "\0".join(arguments).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
