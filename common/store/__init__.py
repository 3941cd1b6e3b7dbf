"""The Redis client: the worker registry and the prefix index, through Lua functions. A worker only writes news.

Everything in Redis is a hint that can be rebuilt. Calls have short time-outs and raise UnavailableError when Redis is
away; a breaker keeps an unreachable Redis from slowing down every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.access import read_login
from common.blocks import BlockKind
from common.errors import UnavailableError
from common.log import Outage
from common.messages import WorkerState, encode
from common.store.link import Link
from common.tls import Tls, client_context
from common.words import Role

log = logging.getLogger("baton.store")

DIGESTS_A_CALL = 1_000  # about 2 ms during which Redis serves nobody else
NEWS_TTL_MS = 60_000
NEWS_POLL_S = 0.02
HEARD_WITHIN_S = 10.0  # after this, the gateways may be of 0.1.0
MAX_CONNECTIONS = 16  # more calls at once wait for a connection
BREAKER_ERRORS = 5
BREAKER_OPEN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Connection settings of Redis; the URL may carry user and password, and start with `rediss://`."""

    url: str = "redis://127.0.0.1:6379"
    credentials: Path | None = None  # a file with `user:password`
    tls: Tls = field(default_factory=Tls)  # used with a URL of `rediss://`
    timeout_s: float = 2.0  # no request waits for registrations and announcements


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The heartbeat's fields that placement needs. Lua reads them by name; a rate of 0 is not measured yet."""

    protocol: int  # version of its messages
    roles: list[str]
    status: str
    kind: str  # see `BlockKind`
    block_size: int
    block_bytes: int
    num_blocks: int
    free_blocks: int
    max_sequences: int
    sequences: int  # running, or waiting to join the batch
    queued_tokens: int  # prompt tokens not yet computed
    prefill_tokens_per_s: float  # without context, if that is measured
    prefill_fixed_ms: float  # fixed cost of a pass
    attention_doubles_at: float  # context length that doubles a token's time; 0: unknown
    local_tokens_per_s: float  # prompt tokens computed beside a decode batch
    decode_step_ms: float
    link_bytes_per_s: float
    tiers: int  # below its pool: host memory, and files below that
    host_bytes_per_s: float  # at which prompts get blocks back from them
    disk_bytes_per_s: float
    pull_bytes_per_s: float  # from peers; 0: it neither asks nor lends


def kind_of(state: WorkerState) -> BlockKind:
    """The kind of blocks in a worker's pool."""
    layout = state.region.layout
    return BlockKind(model=state.model_fingerprint, kv_dtype=layout.dtype, block_size=layout.block_size)


def record_of(state: WorkerState) -> WorkerRecord:
    host, disk = state.totals.host, state.totals.disk
    layout, has_bare_rate = state.region.layout, state.prefill_bare_tokens_per_s > 0
    return WorkerRecord(
        protocol=state.v,
        roles=list(state.roles),
        status=state.status,
        kind=str(kind_of(state)),
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        num_blocks=layout.num_blocks,
        free_blocks=state.free_blocks,
        max_sequences=state.max_sequences,
        sequences=state.running + state.waiting if Role.DECODE in state.roles else 0,
        queued_tokens=state.queued_tokens,
        prefill_tokens_per_s=state.prefill_bare_tokens_per_s or state.prefill_tokens_per_s,
        prefill_fixed_ms=state.prefill_bare_fixed_ms or state.prefill_fixed_ms,
        attention_doubles_at=state.prefill_double_tokens if has_bare_rate else 0.0,
        local_tokens_per_s=state.local_tokens_per_s,
        decode_step_ms=state.decode_step_ms,
        link_bytes_per_s=state.link_bytes_per_s,
        tiers=(host.capacity_bytes > 0) + (disk.capacity_bytes > 0),
        host_bytes_per_s=host.load_bytes_per_s,
        disk_bytes_per_s=disk.load_bytes_per_s,
        pull_bytes_per_s=state.pull_bytes_per_s,
    )


def entry_of(state: WorkerState) -> tuple[str, str, bytes]:
    """A worker's id, incarnation and record, as `baton4_enter` takes them."""
    return state.worker, str(state.incarnation), msgspec.msgpack.encode(record_of(state))


class Store:
    """The client of the function library. One a process; safe for concurrent use."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        settings: RedisSettings,
        *,
        link: Link | None = None,
        libraries: Sequence[str] = (),
    ) -> None:
        """`libraries`: function libraries that this process installs (gateways do; others wait for them)."""
        self._client = client
        self._link = link
        self._settings = settings
        self._libraries = libraries
        self.outage = Outage(log, "redis")
        self._errors = 0
        self._open_until = 0.0
        self._turn = 0  # number of the last news that a gateway read
        self._said = 0  # number of the last news written
        self._unheard_since: float | None = None  # since when no gateway of this release answers
        self._enters_itself = False

    async def register(self, state: WorkerState, *, ttl_ms: int = 3_000) -> bool:
        """Return True if Redis lost blocks of this incarnation, so that all must be announced again.

        Gateways enter the workers that they hear. Those of 0.1.0 don't: there a worker enters itself.
        """
        told = await self._told(state.worker, state.incarnation)
        if told is not None:
            self._unheard_since, self._enters_itself = None, False
            is_known = self._turn <= told <= self._said
            self._turn = told if is_known else 0
            return not is_known
        self._turn, now = 0, time.monotonic()
        if self._unheard_since is None:
            self._unheard_since = now
        if now - self._unheard_since < HEARD_WITHIN_S:
            return True
        worker, incarnation, record = entry_of(state)
        was_entered = self._enters_itself
        answer = await self._call_0_1_0("register", worker, incarnation, ttl_ms, 0, encode(state), record)
        self._enters_itself = answer is not None
        return bool(answer) or not was_entered

    async def unregister(self, worker: str, incarnation: int) -> None:
        """End a worker's lease at gateways of 0.1.0. Those of this release see its last heartbeat."""
        if self._enters_itself:
            await self._call_0_1_0("unregister", worker, str(incarnation))

    async def announce(self, worker: str, incarnation: int, added: list[bytes], removed: list[bytes]) -> None:
        """Announce the blocks that entered or left a worker's pool. Raises UnavailableError."""
        for start in range(0, len(added), DIGESTS_A_CALL):
            part = added[start : start + DIGESTS_A_CALL]
            await self._announce(worker, incarnation, len(part), part)
        for start in range(0, len(removed), DIGESTS_A_CALL):
            await self._announce(worker, incarnation, 0, removed[start : start + DIGESTS_A_CALL])

    async def _announce(self, worker: str, incarnation: int, num_added: int, digests: list[bytes]) -> None:
        """Write the news and wait until a gateway has read it: a worker's user may write no other key."""
        if self._enters_itself:
            await self._call_0_1_0("announce", f"{worker}@{incarnation}", num_added, *digests)
            return
        told = await self._told(worker, incarnation)
        if told is None or told < self._turn:
            raise UnavailableError("no gateway has entered this worker yet, or Redis lost what it announced")
        self._said = turn = max(told, self._said) + 1
        head = f"{incarnation}:{turn}:{num_added}:{len(digests[0])}:"  # all digests have the same length
        news = head.encode() + b"".join(digests)
        await self._guarded(lambda: self._in_time(self._client.set(f"baton:news:{worker}", news, px=NEWS_TTL_MS)))
        give_up_at = time.monotonic() + self._settings.timeout_s
        while await self._told(worker, incarnation) != turn:
            if time.monotonic() > give_up_at:
                raise UnavailableError("no gateway takes this worker's news")
            await asyncio.sleep(NEWS_POLL_S)
        self._turn = turn

    async def _told(self, worker: str, incarnation: int) -> int | None:
        """Number of the last news that a gateway read, 0 for none yet; None if no gateway registered this incarnation."""
        told = await self._guarded(lambda: self._in_time(self._client.get(f"baton:told:{worker}")))
        whose, _, number = bytes(told or b"").partition(b":")
        return int(number) if whose == b"%d" % incarnation and number.isdigit() and len(number) < 16 else None

    async def _call_0_1_0(self, function: str, *args: Any) -> Any:
        """Call a function of release 0.1.0, if its gateways installed it and this user may. Returns None without an answer."""
        try:
            return await self._in_time(self._client.fcall(f"baton3_{function}", 0, *args))
        except (redis.exceptions.RedisError, OSError, TimeoutError):
            return None

    async def load_libraries(self) -> None:
        """Install this process's function libraries, replacing older ones. Raises the Redis client's errors."""
        for text in self._libraries:
            await self._client.function_load(text, replace=True)

    async def call(self, function: str, *args: Any, timeout_s: float) -> Any:
        """Call a function of a library. Raises UnavailableError."""
        return await self._guarded(lambda: self._call_loading(function, args, timeout_s))

    async def recall(self, key: str) -> Any:
        """Return a stored hint's bytes, or None. Raises UnavailableError."""
        return await self._guarded(lambda: self._in_time(self._client.get(key)))

    async def keep(self, key: str, hint: bytes, *, ttl_s: float) -> None:
        """Raises UnavailableError."""
        await self._guarded(lambda: self._in_time(self._client.set(key, hint, px=int(ttl_s * 1000))))

    async def _guarded(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        if time.monotonic() < self._open_until:
            raise UnavailableError("Redis is away; asking again in a moment")
        try:
            answer = await ask()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            self._errors += 1
            if self._errors >= BREAKER_ERRORS:
                self._open_until = time.monotonic() + BREAKER_OPEN_S
                self.outage.failed(f"{type(error).__name__}: {error}"[:200])
            raise UnavailableError(f"Redis: {type(error).__name__} {error}") from error
        self._errors = 0
        self.outage.ended()
        return answer

    async def _in_time(self, asking: Awaitable[Any]) -> Any:
        async with asyncio.timeout(self._settings.timeout_s):
            return await asking

    async def _call_loading(self, function: str, args: Sequence[Any], timeout_s: float) -> Any:
        assert self._link is not None, "this store only installs functions"
        try:
            return await self._link.fcall(function, args, timeout_s=timeout_s)
        except redis.exceptions.ResponseError as error:
            if "function not found" not in str(error).lower():
                raise
        if not self._libraries:
            raise UnavailableError("Redis has none of our functions yet: start a gateway, it installs them")
        await self._in_time(self.load_libraries())  # Redis was restarted or flushed
        return await self._link.fcall(function, args, timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def connect_store(settings: RedisSettings, *, libraries: Sequence[str] = ()) -> AsyncIterator[Store]:
    """Connect, and install this process's function libraries.

    An absent Redis is logged, not raised: it may come later. Raises ConfigError when a file is wrong.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        settings.url,
        **identity_of(settings),
        max_connections=MAX_CONNECTIONS,
        timeout=settings.timeout_s,
        socket_timeout=settings.timeout_s,
        socket_connect_timeout=settings.timeout_s,
        # One retry, for a connection that Redis closed by restarting: the default retries for seconds.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
        protocol=2,
    )
    client = redis.asyncio.Redis.from_pool(pool)
    link = Link(client, pool.make_connection, timeout_s=settings.timeout_s)
    store = Store(client, settings, link=link, libraries=libraries)
    try:
        async with asyncio.timeout(settings.timeout_s):
            await store.load_libraries()
    except redis.exceptions.NoPermissionError:
        log.debug("store.libraries_not_ours")
    except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
        store.outage.failed(f"{type(error).__name__}: {error}"[:200])
    try:
        yield store
    finally:
        await link.close()
        await client.aclose()


def identity_of(settings: RedisSettings) -> dict[str, Any]:
    """Client options for login and TLS. Raises ConfigError."""
    # No CLIENT SETINFO: Redis 7.0 does not know it and refuses users that may call it.
    options: dict[str, Any] = {"driver_info": None}
    if settings.credentials:
        login = read_login(settings.credentials)
        options |= {"username": login.user, "password": login.password}
    if settings.url.startswith("rediss://"):
        tls = settings.tls
        client_context(tls)  # an error names the bad file
        options |= {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
        options |= {"ssl_check_hostname": True, "ssl_min_version": ssl.TLSVersion.TLSv1_2}
    return options
