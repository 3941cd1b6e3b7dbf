"""NATS and Redis of `baton up`: started where no address is given, with a user for each service."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import redis.asyncio
import redis.exceptions

from common import PREFIX
from common.errors import UnavailableError
from common.store import RedisSettings, Store, identity_of
from gateway.placement.ledger import function_libraries
from services.runtime.permissions import Member, Users, make_users
from services.runtime.servers import Server, run_nats, run_redis
from services.up.settings import UpSettings

INSTALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The addresses and logins of NATS and Redis: a user for each service on servers started here, else those given to `up`."""

    nats: Server | None
    redis: Server | None
    users: Users

    @property
    def servers(self) -> list[Server]:
        return [server for server in (self.nats, self.redis) if server is not None]

    def settings(self, user: str) -> dict[str, str]:
        """A service's addresses and credentials, where they differ from the settings."""
        found: dict[str, str] = {}
        for server, file in ((self.nats, self.users.nats_file(user)), (self.redis, self.users.redis_file(user))):
            if server is not None:
                found[f"{server.name}_url"] = server.address
                found[f"{server.name}_credentials"] = str(file)
        return found

    def variables(self, user: str) -> dict[str, str]:
        """The result of `settings` as variables."""
        return {f"{PREFIX}{name.upper()}": value for name, value in self.settings(user).items()}


async def start_servers(
    settings: UpSettings,
    members: Sequence[Member],
    *,
    data: Path,
    held: contextlib.AsyncExitStack,
    say: Callable[[str], None],
) -> Reach:
    """Start each server that has no address; `held` stops it. Raises UnavailableError if one does not start."""
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
    """Install the functions as an admin, so that workers need not wait for a gateway. Raises UnavailableError."""
    options = identity_of(settings) | {"protocol": 2, "socket_timeout": INSTALL_TIMEOUT_S}
    async with redis.asyncio.Redis.from_url(settings.url, **options) as client:
        try:
            await Store(client, settings, libraries=function_libraries()).load_libraries()
        except (redis.exceptions.RedisError, OSError) as error:
            raise UnavailableError(f"Redis: {type(error).__name__} {error}") from error
