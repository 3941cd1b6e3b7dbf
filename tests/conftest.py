"""Fixtures of all tests: real servers, one of each for a whole run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.servers import run_nats, run_redis


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nats_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A NATS server with JetStream, shared: name what you make after your test."""
    async with run_nats(data_dir=tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A Redis or Valkey server, shared: flush it first if you count what is in it."""
    async with run_redis(data_dir=tmp_path_factory.mktemp("redis")) as server:
        yield server.url
