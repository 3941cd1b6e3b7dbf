"""NATS and Redis with a user for each member, and clients of those users."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass

import nats
import nats.errors
import redis.asyncio
import redis.exceptions

from common.access import inbox_of, read_login
from common.bus import NatsSettings
from services.runtime.permissions import Member, Users
from services.runtime.servers import Server

REFUSED = r"(?i)permission|can't access"  # a function that reaches too far: Redis 7.0 has words of its own
MEMBERS = [
    Member("gateway", "gateway-0"),
    Member("gateway", "gateway-1"),
    Member("prefill", "prefill-0"),
    Member("decode", "decode-0"),
    Member("pool", "pool-0"),
    Member("planner"),
    Member("observer"),
]


@dataclass(frozen=True)
class Deployment:
    """Both servers with users."""

    nats: Server
    redis: Server
    users: Users

    def settings(self, user: str) -> NatsSettings:
        return NatsSettings(url=self.nats.address, credentials=self.users.nats_file(user))

    def redis_as(self, user: str) -> redis.asyncio.Redis:
        login = read_login(self.users.redis_file(user))
        return redis.asyncio.Redis.from_url(
            self.redis.address, username=login.user, password=login.password, protocol=2
        )


class Raw:
    """A plain client of one user, and the violations that the server told it of."""

    def __init__(self, client: nats.NATS, violations: list[str]) -> None:
        self.client = client
        self.violations = violations

    async def refused(self, act: Callable[[], Coroutine[object, object, object]]) -> bool:
        """Whether the server says no to this. Its word comes before the answer to the ping behind it."""
        before = len(self.violations)
        await act()
        for _ in range(2):  # the client writes its first ping before what it has in store
            await self.client.flush()
        return len(self.violations) > before


@contextlib.asynccontextmanager
async def connected(deployment: Deployment, user: str) -> AsyncIterator[Raw]:
    violations: list[str] = []

    async def note(error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            violations.append(str(error))

    login = read_login(deployment.users.nats_file(user))
    client = await nats.connect(
        deployment.nats.address,
        user=login.user,
        password=login.password,
        inbox_prefix=inbox_of(login.user),
        error_cb=note,
        allow_reconnect=False,
    )
    try:
        yield Raw(client, violations)
    finally:
        await client.close()
