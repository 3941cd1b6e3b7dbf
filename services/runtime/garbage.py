"""Keep start-up objects out of the garbage collector, and no memory that only the start needed.

A full collection walks all 85,000 containers of a gateway (a worker: 250,000) and stops its streams for 60 (140) ms on a
slow core.
"""

from __future__ import annotations

import gc

from services.runtime.memory import give_back

YOUNG = 10_000  # new containers between two looks


def keep_what_is_loaded() -> None:
    """Call it once, when everything is loaded: later collections then see only newer objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    give_back()
