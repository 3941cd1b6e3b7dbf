"""NATS and Redis of `baton up`: started where no address is given, with a user for each service and made-up passwords."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import redis.asyncio
import redis.exceptions

from common.config import PREFIX, UpSettings
from common.errors import UnavailableError
from common.servers import Server, run_nats, run_redis
from common.store import RedisSettings, Store, identity_of
from services.users.permissions import Member, Users, make_users

INSTALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How services reach the servers. Those started here know each service; for others, all have what `up` was given."""

    nats: Server | None
    redis: Server | None
    users: Users

    @property
    def servers(self) -> list[Server]:
        """Those started here."""
        return [server for server in (self.nats, self.redis) if server is not None]

    def variables(self, user: str) -> dict[str, str]:
        """Addresses and credentials of a service, where they aren't as the settings say."""
        found: dict[str, str] = {}
        for server, file in ((self.nats, self.users.nats_file(user)), (self.redis, self.users.redis_file(user))):
            if server is not None:
                found[f"{PREFIX}{server.name.upper()}_URL"] = server.address
                found[f"{PREFIX}{server.name.upper()}_CREDENTIALS"] = str(file)
        return found


async def start_servers(
    settings: UpSettings,
    members: Sequence[Member],
    *,
    data: Path,
    held: contextlib.AsyncExitStack,
    say: Callable[[str], None],
) -> Reach:
    """Start what has no address; `held` stops it. Raises UnavailableError when a server does not start."""
    users = make_users(members, data / "users")
    nats = redis = None
    if not settings.nats_url:
        say("starting nats …")
        log_file = data / "logs" / "nats.log"
        nats = await held.enter_async_context(run_nats(data_dir=data / "nats", log_file=log_file, extra=users.nats))
    if not settings.redis_url:
        say("starting redis …")
        log_file = data / "logs" / "redis.log"
        redis = await held.enter_async_context(run_redis(data_dir=data / "redis", log_file=log_file, users=users.redis))
        await install_library(RedisSettings(url=replace(redis, login=users.admin_redis).url))
    return Reach(nats=nats, redis=redis, users=users)


async def install_library(settings: RedisSettings) -> None:
    """Install the functions as an admin, so that nobody has to wait for a gateway. Raises UnavailableError."""
    options = identity_of(settings) | {"protocol": 2, "socket_timeout": INSTALL_TIMEOUT_S}
    async with redis.asyncio.Redis.from_url(settings.url, **options) as client:
        try:
            await Store(client, settings).load_library()
        except (redis.exceptions.RedisError, OSError) as error:
            raise UnavailableError(f"Redis: {type(error).__name__} {error}") from error
