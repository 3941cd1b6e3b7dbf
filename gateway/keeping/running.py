"""Loops that take work until they are told to stop."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger("baton.keeping")

RESTART_DELAY_S = 1.0


class Worker(Protocol):
    async def run(self) -> None: ...


async def keep_running(worker: Worker) -> None:
    """Run a worker until it is told to stop, restarting it after a crash."""
    while True:
        try:
            return await worker.run()
        except Exception:
            log.exception("keeping.crashed")
            await asyncio.sleep(RESTART_DELAY_S)
