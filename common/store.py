"""Redis: the worker registry, the prefix-hash index and the load ledger, through one library of Lua functions.

Everything here is a hint that can be rebuilt. Each call has a short time-out and raises UnavailableError when Redis is away; a
breaker keeps an unreachable Redis from slowing down every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.access import read_login
from common.errors import MalformedMessageError, UnavailableError
from common.messages import PROTOCOL_VERSION, WorkerState, decode, encode, worker_state_decoder
from common.tls import Tls, client_context

log = logging.getLogger("baton.store")

LIBRARY = Path(__file__).with_name("store.lua")
BUDGETS = Path(__file__).with_name("budgets.lua")
DIGESTS_A_CALL = 1_000  # Redis does nothing else meanwhile: about 2 ms
DIGESTS_PLACED = 4_096  # of a longer prompt, the rest counts as not cached; looking ends with the first miss
MAX_CONNECTIONS = 16  # more calls at once wait for a connection
BREAKER_ERRORS = 5
BREAKER_OPEN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """How to reach Redis; the URL may carry user and password, and start with `rediss://`."""

    url: str = "redis://127.0.0.1:6379"
    credentials: Path | None = None  # a file with `user:password`
    tls: Tls = field(default_factory=Tls)  # used with a URL of `rediss://`
    place_timeout_s: float = 0.25  # a request waits for it, and has another way
    timeout_s: float = 2.0  # nobody waits for registrations and announcements


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What placement needs to know of a request."""

    request_id: str
    attempt: int
    digests: list[bytes]  # of the prompt's full blocks
    num_tokens: int
    block_size: int
    reserve_tokens: int  # prompt and answer, at most
    deadline_ms: int  # the charge is given back by itself after this
    model_fingerprint: str
    cut_over_tokens: int = 0  # an uncached rest up to this is prefilled on the decode worker; -1: by measured rates
    exclude: list[str] = field(default_factory=list)
    now_ms: int = 0  # of a virtual clock; 0 = Redis's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request goes. `decode` empty: the prefill worker decodes as well."""

    prefill: str
    decode: list[str]
    prefill_incarnation: int = 0
    matched_blocks_prefill: int = 0
    matched_blocks_decode: int = 0
    reason: str = ""
    costs: dict[str, float] = field(default_factory=dict, compare=False)  # what was compared: see `place` in store.lua


def register_arguments(state: WorkerState, ttl_ms: int, *, now_ms: int = 0) -> list[Any]:
    """What `baton2_register` wants to know of a heartbeat. `now_ms` is a virtual clock's; 0 = Redis's own."""
    return [
        *(state.worker, str(state.incarnation), ttl_ms, now_ms),
        *("state", encode(state)),
        *("roles", ",".join(state.roles)),
        *("status", state.status),
        *("fingerprint", state.model_fingerprint),
        *("rate", f"{state.prefill_bare_tokens_per_s or state.prefill_tokens_per_s:.1f}"),
        *("double", f"{state.prefill_double_tokens if state.prefill_bare_tokens_per_s else 0.0:.1f}"),
        *("free_blocks", state.free_blocks),
        *("num_blocks", state.region.layout.num_blocks),
        *("sequences", state.running + state.waiting if "decode" in state.roles else 0),
        *("max_sequences", state.max_sequences),
        *("queued_tokens", state.queued_tokens),
        *("fixed_ms", f"{state.prefill_bare_fixed_ms or state.prefill_fixed_ms:.3f}"),
        *("local_rate", f"{state.local_tokens_per_s:.1f}"),
        *("step_ms", f"{state.decode_step_ms:.3f}"),
        *("link", f"{state.link_bytes_per_s:.0f}"),
        *("block_bytes", state.region.layout.block_bytes, "block_size", state.region.layout.block_size),
        *("protocol", state.v),
    ]


def place_arguments(request: PlacementRequest) -> list[Any]:
    """What `baton2_place` wants to know of a request."""
    return [
        f"{request.request_id}:{request.attempt}",
        request.num_tokens,
        request.block_size,
        request.reserve_tokens,
        max(1, request.deadline_ms),
        request.cut_over_tokens,
        request.model_fingerprint,
        "," + ",".join(request.exclude) + ",",
        request.now_ms,
        PROTOCOL_VERSION,
        *request.digests[:DIGESTS_PLACED],
    ]


def parse_placement(answer: Sequence[Any]) -> Placement:
    """What `baton2_place` answered. Raises UnavailableError when nobody decodes."""
    prefill, incarnation, matched_prefill, matched_decode, reason, costs, *decode_workers = answer
    if not prefill:
        raise UnavailableError(reason.decode())
    return Placement(
        prefill=prefill.decode(),
        prefill_incarnation=int(incarnation),
        decode=[worker.decode() for worker in decode_workers],
        matched_blocks_prefill=int(matched_prefill),
        matched_blocks_decode=int(matched_decode),
        reason=reason.decode(),
        costs={name: float(value) for name, value in (cost.split("=") for cost in costs.decode().split())},
    )


class Store:
    """Calls of the function library. One per process; safe for concurrent use."""

    def __init__(self, client: redis.asyncio.Redis, settings: RedisSettings) -> None:
        self._client = client
        self._settings = settings
        self._errors = 0
        self._open_until = 0.0

    async def register(self, state: WorkerState, *, ttl_ms: int = 3_000) -> bool:
        """Renew a worker's lease; True when Redis didn't know this incarnation: announce every block again."""
        unknown = await self._call("baton2_register", *register_arguments(state, ttl_ms))
        return bool(unknown)

    async def unregister(self, worker: str, incarnation: int) -> None:
        """End a worker's lease, if it is still this incarnation's."""
        await self._call("baton2_unregister", worker, str(incarnation))

    async def workers(self) -> list[WorkerState]:
        """The states of all workers whose lease is valid; unreadable ones (a newer version's) are left out."""
        states = []
        for raw in await self._call("baton2_states"):
            with contextlib.suppress(MalformedMessageError):
                states.append(decode(worker_state_decoder, raw))
        return states

    async def announce(self, worker: str, incarnation: int, added: list[bytes], removed: list[bytes]) -> None:
        """Bring the index up to date with what came into and left a worker's pool."""
        member = f"{worker}@{incarnation}"
        for start in range(0, len(added), DIGESTS_A_CALL):
            part = added[start : start + DIGESTS_A_CALL]
            await self._call("baton2_announce", member, len(part), *part)
        for start in range(0, len(removed), DIGESTS_A_CALL):
            await self._call("baton2_announce", member, 0, *removed[start : start + DIGESTS_A_CALL])

    async def place(self, request: PlacementRequest) -> Placement:
        """Choose workers and charge them, in one atomic step. Raises UnavailableError when none decodes or Redis is away.

        While any decode worker has room, none is given more than it has room for; when all are full, the reason is "full"
        and the least loaded comes first: the request will queue.
        """
        timeout_s = self._settings.place_timeout_s
        return parse_placement(await self._call("baton2_place", *place_arguments(request), timeout_s=timeout_s))

    async def release(self, request_id: str, attempt: int, *, stage: str, workers: Sequence[str] = ()) -> None:
        """Give back what `place` charged for this attempt at `stage`: "prefill", "decode" or "all". Idempotent.

        Redis remembers where; `workers` are looked at as well, in case it had to evict that.
        """
        for one in ("prefill", "decode") if stage == "all" else (stage,):
            await self._call("baton2_release", f"{request_id}:{attempt}", one, 0, *workers)

    async def charged(self, worker: str, stage: Literal["prefill", "decode"]) -> int:
        """Tokens charged to a worker now."""
        return int(await self._call("baton2_charged", stage, worker))

    async def load_library(self) -> None:
        """Install the function libraries, replacing older ones. Raises what the Redis client raises."""
        for library in (LIBRARY, BUDGETS):
            await self._client.function_load(library.read_text(), replace=True)

    async def call(self, function: str, *args: Any, timeout_s: float) -> Any:
        """Call a function of a library. Raises UnavailableError."""
        return await self._call(function, *args, timeout_s=timeout_s)

    async def _call(self, function: str, *args: Any, timeout_s: float | None = None) -> Any:
        if time.monotonic() < self._open_until:
            raise UnavailableError("Redis is away; asking again in a moment")
        try:
            async with asyncio.timeout(timeout_s or self._settings.timeout_s):
                answer = await self._call_loading(function, *args)
        except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
            self._errors += 1
            if self._errors >= BREAKER_ERRORS:
                self._open_until = time.monotonic() + BREAKER_OPEN_S
            raise UnavailableError(f"Redis: {type(error).__name__} {error}") from error
        self._errors = 0
        return answer

    async def _call_loading(self, function: str, *args: Any) -> Any:
        try:
            return await self._client.fcall(function, 0, *args)
        except redis.exceptions.ResponseError as error:
            if "function not found" not in str(error).lower():
                raise
        await self.load_library()  # Redis was restarted or flushed
        return await self._client.fcall(function, 0, *args)


@contextlib.asynccontextmanager
async def connect_store(settings: RedisSettings) -> AsyncIterator[Store]:
    """Connect and install the library, if this user may (gateways may, workers may not).

    A Redis that is away now may come later: that is logged, not raised. Raises ConfigError when a file is wrong.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        settings.url,
        **identity_of(settings),
        max_connections=MAX_CONNECTIONS,
        timeout=settings.timeout_s,
        socket_timeout=settings.timeout_s,
        socket_connect_timeout=settings.timeout_s,
        # Once more at once, for a connection that a restart of Redis closed; by default it would be tried for seconds.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
        protocol=2,
    )
    client = redis.asyncio.Redis.from_pool(pool)
    store = Store(client, settings)
    try:
        async with asyncio.timeout(settings.timeout_s):
            await store.load_library()
    except redis.exceptions.NoPermissionError:
        log.debug("store.library_not_ours")
    except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
        log.warning("store.unavailable", extra={"error": f"{type(error).__name__}: {error}"[:200]})
    try:
        yield store
    finally:
        await client.aclose()


def identity_of(settings: RedisSettings) -> dict[str, Any]:
    """Who we are and whom to trust, as the client's options. Raises ConfigError."""
    # No CLIENT SETINFO: Redis 7.0 refuses users who may do what it has not.
    options: dict[str, Any] = {"driver_info": None}
    if settings.credentials:
        login = read_login(settings.credentials)
        options |= {"username": login.user, "password": login.password}
    if settings.url.startswith("rediss://"):
        tls = settings.tls
        client_context(tls)  # says which file is wrong
        options |= {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
        options |= {"ssl_check_hostname": True, "ssl_min_version": ssl.TLSVersion.TLSv1_2}
    return options
