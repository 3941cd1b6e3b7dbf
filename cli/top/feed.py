"""The client of a gateway's event stream (docs/console.md)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from cli.reach import Gateway
from cli.top.state import State
from common.settings import ConfigError

PATH = "/console/events"
MAX_LINE = 32 << 20  # characters of one event
SILENCE_S = 20.0  # the gateway sends something every 5 s
AGAIN_S = 1.0
WRONG = {
    401: "a key is needed: --api-key, or BATON_API_KEY; the admin key where there is one",
    404: "it has no console: one of 0.1.0 may run with --no-console",
}


async def events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, Any]]:
    """Parse a stream's lines into named events. Raises ValueError for malformed ones."""
    name, data = "", ""
    async for line in lines:
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data += line[5:]
            if len(data) > MAX_LINE:
                raise ValueError("an event is too long")
        elif not line and data:
            yield name, json.loads(data)
            name, data = "", ""


class Feed:
    """The stream's reader: updates `state` and calls `told` after each event."""

    def __init__(self, gateway: Gateway, state: State, told: Callable[[], None]) -> None:
        self._gateway, self._state, self._told = gateway, state, told
        timeout = httpx.Timeout(SILENCE_S, connect=5)
        verify = gateway.trusted or True
        self._client = httpx.AsyncClient(base_url=gateway.url, headers=gateway.headers, verify=verify, timeout=timeout)

    async def close(self) -> None:
        await self._client.aclose()

    async def follow(self) -> None:
        """Read for ever. Raises ConfigError if the gateway refuses, or the first connection fails."""
        while True:
            try:
                await self._read()
            except (httpx.HTTPError, ValueError) as error:
                if not self._state.sections:
                    raise ConfigError(self._gateway.silent(error)) from None
                self._state.trouble = f"no answer: {error or type(error).__name__}"
                self._told()
            await asyncio.sleep(AGAIN_S)

    async def _read(self) -> None:
        async with self._client.stream("GET", PATH) as answer:
            if answer.status_code != 200:
                text = (await answer.aread())[:200].decode(errors="replace")
                raise ConfigError(f"{self._gateway.url}: {WRONG.get(answer.status_code, text)}")
            async for name, told in events(answer.aiter_lines()):
                self._state.take(name, told)
                self._told()
