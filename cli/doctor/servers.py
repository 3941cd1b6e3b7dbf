"""Checks of NATS and Redis: present, of the right kind, and set up as `deploy/` ships them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import nats
import nats.errors
import nats.js.errors
import redis.asyncio
import redis.exceptions

from services.runtime.checks.finding import Finding

TIMEOUT_S = 3.0
RETRY_S = 0.1  # nats-py pauses this long before each attempt, also the first
MAX_PAYLOAD = 8 << 20  # bytes; deploy/nats/nats.conf says why
SLOW_MS = 2.0
REDIS_MAJOR = 7
PROBE = "#!lua name=baton_doctor\nredis.register_function('baton_doctor_probe', function() return 1 end)"


async def check_nats(
    url: str, identity: dict[str, Any] | None = None, *, is_named: bool = True
) -> AsyncIterator[Finding]:
    """Connect to NATS with `common.bus.identity_of`'s identity and check its limits. A default address may be absent."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            client = await nats.connect(
                url,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=RETRY_S,
                connect_timeout=TIMEOUT_S,
                error_cb=_ignore,
                **identity or {},
            )
    except (nats.errors.Error, OSError, TimeoutError, ValueError) as error:
        remedy = "start one (`nats-server -c deploy/nats/nats.conf -sd /data`) or correct --nats-url"
        yield _absent("nats", f"no NATS at {shown(url)} ({type(error).__name__})", remedy, is_named=is_named)
        return
    try:
        yield _round_trip("nats", shown(url), await _timed(client.flush(TIMEOUT_S)))
        if client.max_payload < MAX_PAYLOAD:
            text = f"max_payload is {client.max_payload / 2**20:.1f} MiB"
            yield Finding("nats", "warn", text, "set max_payload: 8MB; longer prompts are refused by the server")
        else:
            yield Finding("nats", "ok", f"max_payload {client.max_payload / 2**20:.0f} MiB")
        yield await _jetstream(client)
    except (nats.errors.Error, OSError, TimeoutError) as error:
        yield Finding("nats", "fail", f"{shown(url)} stopped answering ({type(error).__name__})", "see its log")
    finally:
        await client.close()


async def _jetstream(client: Any) -> Finding:
    try:
        await client.jetstream(timeout=TIMEOUT_S).account_info()
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError) as error:
        remedy = "start nats-server with -js, or with deploy/nats/nats.conf"
        return Finding("nats", "fail", f"JetStream is off ({type(error).__name__})", remedy)
    return Finding("nats", "ok", "JetStream is on")


async def check_redis(
    url: str, identity: dict[str, Any] | None = None, *, is_named: bool = True
) -> AsyncIterator[Finding]:
    """Connect to Redis with `common.store.identity_of`'s identity and check its version, eviction and functions.

    Loads and drops a library of its own, if it may. One that nobody named may be absent.
    """
    try:
        client = redis.asyncio.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, protocol=2, **identity or {}
        )
    except ValueError:
        yield Finding("redis", "fail", f"{shown(url)} is not an address of Redis", "--redis-url redis://HOST:PORT")
        return
    try:
        info = await client.info("server")
        yield _round_trip("redis", shown(url), await _timed(client.ping()))
        yield _version(info)
        yield await _eviction(client)
        yield await _functions(client)
    except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
        remedy = (
            "start one (`redis-server deploy/redis/index.conf`) or correct --redis-url; without it placement is local"
        )
        yield _absent("redis", f"no Redis at {shown(url)} ({type(error).__name__})", remedy, is_named=is_named)
    finally:
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            await client.aclose()


def _absent(check: str, text: str, remedy: str, *, is_named: bool) -> Finding:
    if is_named:
        return Finding(check, "fail", text, remedy)
    return Finding(check, "ok", f"{text}: `baton up` starts its own")


def _version(info: dict[str, Any]) -> Finding:
    if "valkey_version" in info:
        return Finding("redis", "ok", f"Valkey {info['valkey_version']}")
    version = str(info.get("redis_version", "0"))
    if int(version.partition(".")[0]) < REDIS_MAJOR:
        return Finding("redis", "fail", f"Redis {version} has no functions", "use Redis 7.0 or later, or Valkey")
    return Finding("redis", "ok", f"Redis {version}")


async def _eviction(client: Any) -> Finding:
    try:
        policy = str((await client.info("memory"))["maxmemory_policy"])
    except (redis.exceptions.ResponseError, KeyError):
        return Finding("redis", "warn", "does not tell its maxmemory-policy", "check that it is volatile-lfu")
    if policy in ("volatile-lfu", "noeviction"):
        return Finding("redis", "ok", f"maxmemory-policy {policy}")
    text = f"maxmemory-policy {policy} may evict the worker registry"
    return Finding("redis", "warn", text, "set maxmemory-policy volatile-lfu (deploy/redis/index.conf)")


async def _functions(client: Any) -> Finding:
    try:
        await client.function_load(PROBE, replace=True)
    except redis.exceptions.NoPermissionError:
        return Finding("redis", "ok", "this user may load no functions; gateways do")
    except redis.exceptions.ResponseError as error:
        return _no_functions(error)
    try:
        await client.fcall("baton_doctor_probe", 0)
        await client.function_delete("baton_doctor")
    except redis.exceptions.ResponseError as error:
        return _no_functions(error)
    return Finding("redis", "ok", "functions load and run")


def _no_functions(error: redis.exceptions.ResponseError) -> Finding:
    remedy = "allow the user +fcall +function|load +function|delete, or give doctor an observer's credentials"
    return Finding("redis", "fail", f"functions can't be loaded ({str(error)[:60]})", remedy)


def _round_trip(check: str, where: str, seconds: float) -> Finding:
    text = f"{where} answers in {seconds * 1e3:.2f} ms"
    if seconds * 1e3 > SLOW_MS:
        return Finding(check, "warn", text, "every request makes several such round trips: keep it close")
    return Finding(check, "ok", text)


async def _timed(call: Any) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


async def _ignore(error: Exception) -> None:
    """No-op: the failed call reports it."""


def shown(url: str) -> str:
    """The URL without credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
