"""Token frames: the output of a step, one message for each gateway."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from common.bus import Bus
from common.errors import UnavailableError
from common.messages import Frame, Tokens
from worker.identity import Identity

MAX_FRAME_TOKENS = 4096  # entries of a frame; logprobs make entries large


class FrameOutbox:
    """Collects `Tokens` and publishes one `Frame` for each gateway at `flush`, in order.

    A frame that the bus refused is not kept: the gateway notices the gap and asks for it (`Resend`).
    """

    def __init__(self, *, bus: Bus, identity: Identity) -> None:
        self._bus = bus
        self._identity = identity
        self._pending: dict[str, list[Tokens]] = defaultdict(list)
        self._ready = asyncio.Event()
        self.lost_frames = 0

    def add(self, gateway: str, tokens: Tokens) -> None:
        self._pending[gateway].append(tokens)
        self._ready.set()

    async def run(self) -> None:
        """Publish the tokens collected by `add` at the event loop's next turn, until cancelled."""
        while True:
            await self._ready.wait()
            await self.flush()

    async def flush(self) -> None:
        self._ready.clear()
        pending, self._pending = self._pending, defaultdict(list)
        for gateway, entries in pending.items():
            for start in range(0, len(entries), MAX_FRAME_TOKENS):
                await self._publish(gateway, entries[start : start + MAX_FRAME_TOKENS])

    async def _publish(self, gateway: str, entries: list[Tokens]) -> None:
        frame = Frame(worker=self._identity.worker, incarnation=self._identity.incarnation, tokens=entries)
        try:
            await self._bus.publish(self._identity.frames_to(gateway), frame)
        except UnavailableError:
            self.lost_frames += 1
