"""Requests from a parent process by lines of JSON, and answers back: what the class `LLM` of `baton.py` starts.

The first line out says that the model is loaded, or why it isn't. A line in is {"id", "url", "body"}, one out {"id", "status",
"body"}, in the order of their ends. The end of the input ends the process once all is answered.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec

from services.offline.bounded import bounded
from services.offline.offline import Offline, opened
from services.offline.pooling import OfflinePooling
from services.worker.settings import WorkerServiceSettings

MAX_LINE = 64 << 20


class Line(msgspec.Struct, frozen=True):
    """A request."""

    id: int
    url: str
    body: msgspec.Raw


_lines = msgspec.json.Decoder(Line)
_json = msgspec.json.Encoder()


def own_output() -> int:
    """A descriptor of standard output for lines alone; what else is printed goes to standard error from now on."""
    out = os.dup(1)
    os.dup2(2, 1)
    return out


async def serve_lines(settings: WorkerServiceSettings, out: int) -> None:
    """Load the model, and answer lines until the input ends."""
    async with opened(settings) as offline:
        ready = {"model": offline.name, "max_model_len": offline.max_model_len, "max_line": MAX_LINE}
        tell(out, {"ready": ready})
        reader = asyncio.StreamReader(limit=MAX_LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb")
        )
        async with bounded(offline.most) as start:
            while raw := await reader.readline():
                await start(_answer(offline, _lines.decode(raw), out))


async def _answer(offline: Offline | OfflinePooling, line: Line, out: int) -> None:
    status, body = await offline.answered(line.url, bytes(line.body))
    tell(out, {"id": line.id, "status": status, "body": body})


def tell(out: int, told: Any) -> None:
    """Write a line. A parent that doesn't read stops everything here, which is what it means."""
    data = memoryview(_json.encode(told) + b"\n")
    try:
        while data:
            data = data[os.write(out, data) :]
    except BrokenPipeError:
        sys.exit(0)
