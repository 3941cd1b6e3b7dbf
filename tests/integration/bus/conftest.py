"""What tests of the bus share: a bus with short limits, and a plain client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import nats
import nats.js.errors
import pytest

from common import subjects
from common.bus import NatsBus, NatsSettings, QueueLimits, connect_bus
from tests.integration.bus.looks import PATIENT


@pytest.fixture
def limits() -> QueueLimits:
    return PATIENT


@pytest.fixture
async def bus(nats_url: str, limits: QueueLimits) -> AsyncIterator[NatsBus]:
    """Each test starts and ends with empty queues: others use the same server."""
    await _delete_queues(nats_url)
    async with connect_bus(NatsSettings(url=nats_url), name="test", limits=limits) as bus:
        yield bus
    await _delete_queues(nats_url)


async def _delete_queues(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    for stream in (subjects.JOBS_STREAM, subjects.DEAD_STREAM):
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await client.jetstream().delete_stream(stream)
    await client.close()


@pytest.fixture
async def raw(nats_url: str) -> AsyncIterator[nats.NATS]:
    """A plain client beside the bus, to look at and to disturb."""
    client = await nats.connect(nats_url)
    yield client
    await client.close()
