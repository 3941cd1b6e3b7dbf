"""Both servers with users, for each module of these tests."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.store import RedisSettings
from services.runtime.permissions import make_users
from services.runtime.servers import run_nats, run_redis
from services.up.servers import install_library
from tests.integration.access.deployment import MEMBERS, Deployment


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    folder = tmp_path_factory.mktemp("access")
    users = make_users(MEMBERS, folder / "users")
    async with (
        run_nats(data_dir=folder / "nats", extra=users.nats) as nats_server,
        run_redis(data_dir=folder / "redis", users=users.redis) as redis_server,
    ):
        await install_library(RedisSettings(url=dataclasses.replace(redis_server, login=users.admin_redis).url))
        yield Deployment(nats_server, redis_server, users)
