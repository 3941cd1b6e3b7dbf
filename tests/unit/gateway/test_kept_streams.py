"""What a cancelled call of kept streams does where NATS answers at that very moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from common.wire import Wire
from gateway.batches.records import BatchLimits
from gateway.batches.store import batch_streams
from gateway.keeping.streams import KeptStreams

ANSWER = SimpleNamespace(seq=7, data=b"")
CALLS: dict[str, Callable[[KeptStreams], Awaitable[object]]] = {
    "put": lambda streams: streams.put("baton.batch.x", b""),
    "get": lambda streams: streams.get("baton.batch.x"),
    "fetch": lambda streams: streams.fetch("line", 1),
}


async def _answered_all_the_same(*_: object, **__: object) -> Any:
    """As `wait_for` of Python 3.11, whose caller is cancelled when it has a result."""
    try:
        await asyncio.Future()
    except asyncio.CancelledError:
        return ANSWER


async def _messages(*_: object, **__: object) -> list[Any]:
    await _answered_all_the_same()
    return [SimpleNamespace(data=b"", metadata=SimpleNamespace(num_delivered=1, num_pending=0))]


@pytest.mark.parametrize("name", CALLS)
async def test_it_ends_and_keeps_what_came(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on to the next call, and was told again a second later: `Batches.stop` took several."""
    streams = batch_streams(Wire(), BatchLimits())

    async def ensured() -> None: ...

    monkeypatch.setattr(streams, "_ensure", ensured)
    monkeypatch.setattr(streams._js, "publish", _answered_all_the_same)
    monkeypatch.setattr(streams._js, "get_msg", _answered_all_the_same)
    monkeypatch.setitem(streams._pulls, "line", SimpleNamespace(fetch=_messages))
    call = asyncio.ensure_future(CALLS[name](streams))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(streams._held) == (name == "fetch")  # `close` gives it back
