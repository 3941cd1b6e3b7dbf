"""From settings to connections: how every service reaches NATS and Redis."""

from __future__ import annotations

from pathlib import Path

from common.bus import NatsSettings
from common.config import NatsOptions, Settings
from common.store import RedisSettings
from common.tls import Tls


def nats_settings(settings: NatsOptions) -> NatsSettings:
    """Address, user and certificates of NATS."""
    return NatsSettings(
        url=settings.nats_url,
        credentials=_file(settings.nats_credentials),
        tls=Tls(ca=_file(settings.nats_ca), cert=_file(settings.nats_cert), key=_file(settings.nats_key)),
    )


def redis_settings(settings: Settings) -> RedisSettings:
    """Address, user and certificates of Redis."""
    return RedisSettings(
        url=settings.redis_url,
        credentials=_file(settings.redis_credentials),
        tls=Tls(ca=_file(settings.redis_ca), cert=_file(settings.redis_cert), key=_file(settings.redis_key)),
    )


def _file(name: str) -> Path | None:
    return Path(name) if name else None
