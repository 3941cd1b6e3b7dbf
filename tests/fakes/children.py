"""Processes of a host that do nothing: they start, hear signals and stop."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, ClassVar


class IdleChild:
    """In place of `services.host.child.Child`. A test begins with `forget()`."""

    born: ClassVar[list[IdleChild]] = []
    drained: ClassVar[asyncio.Event]  # children that are told to stop wait for it

    @classmethod
    def forget(cls) -> None:
        """Forget all children; those to come stop at once."""
        cls.born, cls.drained = [], asyncio.Event()
        cls.drained.set()

    def __init__(self, *, name: str, **_: Any) -> None:
        self.name, self.log_file = name, Path("/nonexistent")
        self.signals: list[signal.Signals] = []
        self.starts = 0
        self.born.append(self)

    async def start(self) -> None:
        self.starts += 1
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def stop(self, *, timeout_s: float) -> None:
        await self.drained.wait()
        if not self.ended.done():
            self.ended.set_result(0)
