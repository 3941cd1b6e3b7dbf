"""A NATS server of each module's own, and a store of responses in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.bus import NatsSettings
from gateway.responses.records import ResponseLimits
from gateway.responses.store import ResponseStore, response_streams
from services.runtime.servers import run_nats


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with run_nats(data_dir=tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest_asyncio.fixture
async def store(url: str) -> AsyncIterator[ResponseStore]:
    limits = ResponseLimits(store_bytes=16 << 20)
    streams = response_streams(NatsSettings(url=url), limits)
    await streams.open()
    yield ResponseStore(streams, limits)
    await streams.close()
