"""What a process loaded at its start stays, so the garbage collector need not look at it again and again.

A full collection walks through every container object there is, 85,000 in a gateway and 250,000 in a worker before its first
request, and stops all of its streams: for 60 and 140 ms on a slow core, a gateway's once a minute at 10 requests a second.
"""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Call it once, when everything is loaded: later collections see what came after, of a few requests, alone."""
    gc.collect()
    gc.freeze()
