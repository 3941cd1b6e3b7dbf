"""The console's event stream: changes as server-sent events while somebody watches.

One picture is built twice a second for all watchers. A watcher has no queue: it gets the newest picture once it has taken the
last one, so a slow reader misses pictures and delays nobody. A client that does not read at all is cut off by its connection
(`gateway.http.connection`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec

from common.errors import UnavailableError

log = logging.getLogger("baton.console")

TICK_S = 0.5
PING_S = 5.0  # a ping detects that the client left
MAX_WATCH_S = 300.0  # a page then connects again, with its key
MAX_WATCHERS = 64

_encoder = msgspec.json.Encoder()

Sections = Mapping[str, Any]  # event -> its data


class Feed:
    def __init__(self, build: Callable[[], Awaitable[Sections]], *, leaving: asyncio.Event) -> None:
        self._build = build
        self._leaving = leaving
        self._events: dict[str, tuple[int, bytes]] = {}  # name -> the picture of its last change, and the event
        self._said: dict[str, bytes] = {}
        self._picture = 0
        self._changed = asyncio.Event()
        self._building: asyncio.Task[None] | None = None
        self.watchers = 0

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """One watcher's events: all sections, then changed ones. Raises UnavailableError beyond MAX_WATCHERS."""
        if self.watchers >= MAX_WATCHERS:
            raise UnavailableError(
                f"{MAX_WATCHERS} pages watch this gateway already: close one, or ask another gateway"
            )
        return self._watch()

    async def _watch(self) -> AsyncGenerator[bytes, None]:
        if self.watchers >= MAX_WATCHERS:
            return  # others joined meanwhile
        self.watchers += 1
        ends_at, seen = time.monotonic() + MAX_WATCH_S, 0
        try:
            if self._building is None or self._building.done():
                self._building = asyncio.create_task(self._keep_building())
            yield b"retry: 1000\n\n"
            while time.monotonic() < ends_at and not self._leaving.is_set():
                news = [event for picture, event in self._events.values() if picture > seen]
                seen = self._picture
                if news:
                    yield b"".join(news)
                    continue  # changes that came meanwhile are sent at once
                changed = self._changed
                try:
                    async with asyncio.timeout(PING_S):
                        await changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.watchers -= 1

    async def _keep_building(self) -> None:
        """Build pictures while somebody watches. The next watcher gets a new one."""
        try:
            while self.watchers and not self._leaving.is_set():
                began = time.monotonic()
                try:
                    self._take(await self._build())
                except Exception:  # nobody would restart this task, and the next picture may succeed
                    log.exception("console.feed_failed")
                await asyncio.sleep(max(0.0, TICK_S - (time.monotonic() - began)))
        finally:
            self._events.clear()
            self._said.clear()
            self._wake()

    def _take(self, sections: Sections) -> None:
        now = time.time()
        changed = {
            name: said for name, value in sections.items() if (said := _encoder.encode(value)) != self._said.get(name)
        }
        if not changed:
            return
        self._picture += 1
        self._said |= changed
        for name, said in changed.items():
            self._events[name] = self._picture, b"event: %b\nid: %.3f\ndata: %b\n\n" % (name.encode(), now, said)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
