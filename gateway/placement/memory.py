"""The age of groups of decode workers, kept in Redis as a hint for gateways that start later."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

import msgspec

from common.errors import UnavailableError
from common.store import Store
from gateway.placement.incumbents import REMEMBERED_S, Incumbents, mark

LOOK_S, WRITE_S = 1.0, 60.0  # on a change, and periodically
MAX_BYTES = 1 << 20


class Memory:
    """The record shared by gateways that serve the same models."""

    def __init__(self, store: Store, models: Iterable[str]) -> None:
        self._store = store
        self._key = f"baton:incumbents:{mark(' '.join(sorted(models)))}"
        self._writing: asyncio.Task[None] | None = None

    async def read(self) -> dict[str, str]:
        """Marks by subject from an earlier gateway; none while Redis is down."""
        try:
            raw = await self._store.recall(self._key) or b""
            return msgspec.json.decode(raw[:MAX_BYTES], type=dict[str, str])
        except (UnavailableError, msgspec.DecodeError, UnicodeDecodeError):
            return {}

    def start(self, incumbents: Incumbents) -> None:
        """Start writing it periodically."""
        self._writing = asyncio.create_task(self._write_often(incumbents))

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing

    async def _write_often(self, incumbents: Incumbents) -> None:
        written: dict[str, str] = {}
        write_at = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            marks, now = incumbents.marks, time.monotonic()
            if marks and (marks != written or now >= write_at):
                with contextlib.suppress(UnavailableError):
                    await self._store.keep(self._key, msgspec.json.encode(marks), ttl_s=REMEMBERED_S)
                    written, write_at = marks, now + WRITE_S
