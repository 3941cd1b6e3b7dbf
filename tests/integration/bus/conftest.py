"""What tests of the bus share: a bus with short limits, and a plain client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import nats
import pytest

from common import subjects
from common.bus import NatsBus, NatsSettings, QueueLimits, connect_bus
from tests.integration.bus.looks import PATIENT


@pytest.fixture
def limits() -> QueueLimits:
    return PATIENT


@pytest.fixture
async def bus(nats_url: str, limits: QueueLimits) -> AsyncIterator[NatsBus]:
    async with connect_bus(NatsSettings(url=nats_url), name="test", limits=limits) as bus:
        yield bus
    client = await nats.connect(nats_url)
    for stream in (subjects.JOBS_STREAM, subjects.DEAD_STREAM):
        await client.jetstream().delete_stream(stream)  # so that each test starts with empty queues
    await client.close()


@pytest.fixture
async def raw(nats_url: str) -> AsyncIterator[nats.NATS]:
    """A plain client beside the bus, to look at and to disturb."""
    client = await nats.connect(nats_url)
    yield client
    await client.close()
