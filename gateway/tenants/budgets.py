"""Budgets of tenants over all gateways: requests and tokens a minute, and requests in flight.

A token bucket holds a minute's limit and fills evenly. A request is charged what it may use at most, and settled to what it used.
While Redis is away each gateway counts by itself.

Charges in Redis are leases, which a gateway renews while it lives: those of a dead one end within `LEASE_S`, settled to what the
last renewal said.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common.errors import UnavailableError
from common.store import Store

log = logging.getLogger("baton.tenants")

SAFELY = Path(__file__).with_name("safely.lua")
MINUTE_S = 60.0
TAKE_TIMEOUT_S = 0.25  # then this gateway counts by itself
SETTLE_TIMEOUT_S = 2.0  # no request waits for it
CONCURRENT_RETRY_S = 1.0
LEASE_S = 10.0
RENEW_S = 3.0
RENEWED_A_CALL = 200  # requests; about 2 ms during which Redis serves nobody else
TENANTS_A_CALL = 1_000
REFUSALS = ("", "requests", "tokens", "concurrent")

_T = TypeVar("_T")


def with_safe_reads(name: str, *texts: Path, before: str = "") -> str:
    """A Redis function library: `before`, `safely.lua`, then `texts`."""
    return "\n".join([f"#!lua name={name}", before, *(part.read_text() for part in (SAFELY, *texts))])


def budgets_library() -> str:
    return with_safe_reads("baton2_budgets", Path(__file__).with_name("budgets.lua"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one tenant; 0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A budget's reply: `refused` is "", "requests", "tokens" or "concurrent". Times are in seconds from then."""

    tenant: str
    request_id: str
    limits: Limits
    tokens: int = 0  # charged
    refused: str = ""
    retry_after_s: float = 0.0
    remaining_requests: int = 0
    remaining_tokens: int = 0
    full_requests_s: float = 0.0
    full_tokens_s: float = 0.0
    counted_here: bool = False  # Redis was down


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A tenant's remaining budget; below 0 if it used more than charged."""

    limits: Limits
    requests: int = 0
    tokens: int = 0
    running: int = 0  # requests in flight, counted only under a limit

    def used(self) -> dict[str, tuple[int, int]]:
        """Budget -> (used, limit), for budgets with a limit."""
        limits = self.limits
        every = {
            "requests": (limits.requests_per_minute - self.requests, limits.requests_per_minute),
            "tokens": (limits.tokens_per_minute - self.tokens, limits.tokens_per_minute),
            "concurrent": (self.running, limits.max_concurrent),
        }
        return {name: pair for name, pair in every.items() if pair[1]}


class Budgets(Protocol):
    """The counter of tenants' usage."""

    async def take(
        self, tenant: str, limits: Limits, request_id: str, *, tokens: int, ttl_s: float, used: Callable[[], int] = int
    ) -> Grant:
        """Charge `tokens` for a request that ends within `ttl_s`, or refuse it. `used()`: the tokens that it used so far."""
        ...

    async def settle(self, grant: Grant, *, used: int | None) -> None:
        """Settle an ended request, with the tokens used; None: it was never admitted."""
        ...

    async def left(self, tenants: Mapping[str, Limits]) -> dict[str, Left]:
        """Each tenant's remaining budget over all gateways."""
        ...


@dataclass(slots=True)
class _Held:
    """A request in flight, and Redis' knowledge of it."""

    grant: Grant
    used: Callable[[], int]
    told: int = 0  # tokens reported by the last renewal
    in_redis: bool = True

    def renewal(self) -> tuple[str, str, int, int, int, int]:
        grant, limits = self.grant, self.grant.limits
        is_counted = int(limits.max_concurrent > 0)
        reserved = grant.tokens - self.used()
        return (
            grant.tenant,
            grant.request_id,
            reserved,
            is_counted,
            limits.requests_per_minute,
            limits.tokens_per_minute,
        )


class SharedBudgets:
    """The counter in Redis for all gateways, and in this process while Redis is down."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._here = LocalBudgets(clock=clock)
        self._held: dict[str, _Held] = {}
        self._renewed_at = clock()
        self._renewal: asyncio.Task[None] | None = None  # at most one, shared by all waiters
        self._told_of_nonsense = False

    @contextlib.asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """Context manager: renew requests in flight."""
        task = asyncio.create_task(self._renew_often())
        try:
            yield
        finally:
            tasks = [task, self._renewal] if self._renewal else [task]
            for one in tasks:
                one.cancel()
            await asyncio.wait(tasks)

    async def _renew_often(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Report requests in flight to Redis: also those that it lost, or that started while it was down."""
        await asyncio.shield(self._renewing())

    def _renewing(self) -> asyncio.Task[None]:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
        return self._renewal

    async def _renew(self) -> None:
        try:
            for part in _parts(list(self._held.values()), RENEWED_A_CALL):
                told = [held.renewal() for held in part]
                arguments = itertools.chain.from_iterable(told)
                await self._store.call("baton2_budget_renew", _ms(LEASE_S), 0, *arguments, timeout_s=SETTLE_TIMEOUT_S)
                for held, (_, _, reserved, *_) in zip(part, told, strict=True):
                    held.told, held.in_redis = held.grant.tokens - reserved, True
            self._renewed_at = self._clock()
        except UnavailableError:
            pass  # the next one may be in time

    async def take(
        self, tenant: str, limits: Limits, request_id: str, *, tokens: int, ttl_s: float, used: Callable[[], int] = int
    ) -> Grant:
        is_renewed = await self._is_renewed()
        grant = await self._take_there(tenant, limits, request_id, tokens=tokens) if is_renewed else None
        if grant is None:
            grant = await self._here.take(tenant, limits, request_id, tokens=tokens, ttl_s=ttl_s)
        if not grant.refused:
            self._held[request_id] = _Held(grant, used, in_redis=not grant.counted_here)
        return grant

    async def _is_renewed(self) -> bool:
        """Return True if Redis may be asked. After a suspension, running requests are counted before new ones."""
        if not self._held or self._clock() - self._renewed_at <= LEASE_S:
            return True
        done, _ = await asyncio.wait([self._renewing()], timeout=TAKE_TIMEOUT_S)
        return bool(done)

    async def _take_there(self, tenant: str, limits: Limits, request_id: str, *, tokens: int) -> Grant | None:
        try:
            answer = await self._store.call(
                "baton2_budget_take",
                *(tenant, request_id, tokens),
                *(limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent),
                *(_ms(LEASE_S), 0),
                timeout_s=TAKE_TIMEOUT_S,
            )
        except UnavailableError:
            return None
        try:
            word, *figures = answer
            refused: str | None = word.decode()
            wait_ms, requests_left, tokens_left, full_requests_ms, full_tokens_ms = map(int, figures)
        except (TypeError, ValueError, AttributeError):
            refused = None
        if refused not in REFUSALS:
            self._nonsense(answer)
            return None
        return Grant(
            tenant=tenant,
            request_id=request_id,
            limits=limits,
            tokens=min(tokens, limits.tokens_per_minute),
            refused=refused,
            retry_after_s=wait_ms / 1000,
            remaining_requests=requests_left,
            remaining_tokens=tokens_left,
            full_requests_s=full_requests_ms / 1000,
            full_tokens_s=full_tokens_ms / 1000,
        )

    async def settle(self, grant: Grant, *, used: int | None) -> None:
        held = self._held.pop(grant.request_id, None)
        if grant.counted_here:
            await self._here.settle(grant, used=used)
        if self._renewal is not None:
            await asyncio.wait([self._renewal])  # an outstanding renewal would restore what was settled
        if held is None or not held.in_redis:
            return
        limits = grant.limits
        try:
            await self._store.call(
                "baton2_budget_settle",
                *(grant.tenant, grant.request_id, int(used is None), grant.tokens, used or 0, held.told),
                *(limits.requests_per_minute, limits.tokens_per_minute, 0),
                timeout_s=SETTLE_TIMEOUT_S,
            )
        except UnavailableError:
            pass  # the lease ends, and the bucket refills by itself

    async def left(self, tenants: Mapping[str, Limits]) -> dict[str, Left]:
        found: dict[str, Left] = {}
        for part in _parts(list(tenants.items()), TENANTS_A_CALL):
            asked = [
                value for name, limits in part for value in (name, limits.requests_per_minute, limits.tokens_per_minute)
            ]
            try:
                answer = await self._store.call("baton2_budget_left", 0, *asked, timeout_s=TAKE_TIMEOUT_S)
                for (name, limits), figures in zip(part, answer, strict=True):
                    requests, tokens, running = map(int, figures)
                    found[name] = Left(limits=limits, requests=requests, tokens=tokens, running=running)
            except UnavailableError:
                return await self._here.left(tenants)
            except (TypeError, ValueError):
                self._nonsense(answer)
                return await self._here.left(tenants)
        return found

    def _nonsense(self, answer: Any) -> None:
        """Count locally: Redis holds unexpected data. Logged once, not for each request."""
        if not self._told_of_nonsense:
            log.warning("budgets.unreadable_answer", extra={"answer": repr(answer)[:200]})
        self._told_of_nonsense = True


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _parts(values: list[_T], size: int) -> Iterator[list[_T]]:
    return (values[at : at + size] for at in range(0, len(values), size))


def returned(grant: Grant, used: int | None) -> tuple[int, int]:
    """Requests and tokens to refund; negative if more was used than charged."""
    return (1, grant.tokens) if used is None else (0, grant.tokens - used)


@dataclass(slots=True)
class _Bucket:
    """A tenant's buckets and requests in flight, in this process."""

    requests: float
    tokens: float
    at: float
    running: dict[str, float] = field(default_factory=dict)  # request -> its deadline

    def fill(self, limits: Limits, now: float) -> None:
        passed, self.at = max(0.0, now - self.at) / MINUTE_S, now
        self.requests = min(limits.requests_per_minute, self.requests + limits.requests_per_minute * passed)
        self.tokens = min(limits.tokens_per_minute, self.tokens + limits.tokens_per_minute * passed)
        self.running = {name: until for name, until in self.running.items() if until > now}


class LocalBudgets:
    """The counter in this process only, with the same rules."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}  # one a configured tenant

    async def take(
        self, tenant: str, limits: Limits, request_id: str, *, tokens: int, ttl_s: float, used: Callable[[], int] = int
    ) -> Grant:
        now, bucket = self._clock(), self._filled(tenant, limits)
        charge = min(tokens, limits.tokens_per_minute)
        waits = {
            "tokens": _seconds_until(charge, bucket.tokens, limits.tokens_per_minute),
            "requests": _seconds_until(1, bucket.requests, limits.requests_per_minute),
        }
        refused = max(waits, key=lambda what: waits[what])
        retry_s = waits[refused]
        if not retry_s:
            full = limits.max_concurrent and len(bucket.running) >= limits.max_concurrent
            refused, retry_s = ("concurrent", CONCURRENT_RETRY_S) if full else ("", 0.0)
        if not refused:
            bucket.requests -= 1 if limits.requests_per_minute else 0
            bucket.tokens -= charge
            if limits.max_concurrent:
                bucket.running[request_id] = now + ttl_s
        return Grant(
            tenant=tenant,
            request_id=request_id,
            limits=limits,
            tokens=charge,
            refused=refused,
            retry_after_s=retry_s,
            remaining_requests=max(0, math.floor(bucket.requests)),
            remaining_tokens=max(0, math.floor(bucket.tokens)),
            full_requests_s=_seconds_until(limits.requests_per_minute, bucket.requests, limits.requests_per_minute),
            full_tokens_s=_seconds_until(limits.tokens_per_minute, bucket.tokens, limits.tokens_per_minute),
            counted_here=True,
        )

    async def settle(self, grant: Grant, *, used: int | None) -> None:
        bucket, limits = self._filled(grant.tenant, grant.limits), grant.limits
        requests, tokens = returned(grant, used)
        bucket.running.pop(grant.request_id, None)
        bucket.requests = min(limits.requests_per_minute, bucket.requests + requests)
        if limits.tokens_per_minute:
            bucket.tokens = min(limits.tokens_per_minute, bucket.tokens + tokens)

    async def left(self, tenants: Mapping[str, Limits]) -> dict[str, Left]:
        buckets = {name: self._filled(name, limits) for name, limits in tenants.items()}
        return {
            name: Left(
                limits=limits,
                requests=math.floor(buckets[name].requests),
                tokens=math.floor(buckets[name].tokens),
                running=len(buckets[name].running),
            )
            for name, limits in tenants.items()
        }

    def _filled(self, tenant: str, limits: Limits) -> _Bucket:
        now = self._clock()
        full = _Bucket(limits.requests_per_minute, limits.tokens_per_minute, now)
        bucket = self._buckets.setdefault(tenant, full)
        bucket.fill(limits, now)
        return bucket


def _seconds_until(wanted: float, left: float, limit: int) -> float:
    return max(0.0, wanted - left) * MINUTE_S / limit if limit else 0.0
