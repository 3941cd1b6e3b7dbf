"""The watchdog for gateways of `baton up`: a stopped or silent one is logged and killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from services.up.readiness import PATIENCE_S, answers

LOOK_S = 1.0
STOPPED_S = 3.0  # stopped by a signal or a debugger
SILENT_S = 15.0  # a busy gateway is slow, but better than none


async def standing(url: str, pid: Callable[[], int | None]) -> str:
    """Return why the gateway at `url` is stuck, once it is. One that refuses connections is starting or exiting."""
    moved_at = ran_at = time.monotonic()
    while True:
        asked_at = time.monotonic()
        is_silent = await answers(url) is None
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        if now - asked_at > 2 * (PATIENCE_S + LOOK_S):  # this process itself was suspended
            moved_at = ran_at = now
        if not is_silent:
            moved_at = now
        if not is_stopped(pid()):
            ran_at = now
        if now - ran_at >= STOPPED_S:
            return f"is stopped, for {now - ran_at:.0f} s"
        if now - moved_at >= SILENT_S:
            return f"does not answer, for {now - moved_at:.0f} s"


def is_stopped(pid: int | None) -> bool:
    """True if a signal stopped the process (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
