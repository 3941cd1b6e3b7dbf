"""A Redis in which anything may be wrong: every key that the functions read, damaged in every way that a type allows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from common.errors import UnavailableError
from gateway.placement.ledger import Ledger
from gateway.tenants.budgets import Limits, SharedBudgets
from tests.integration.fleet import TTL_MS, FleetStore, a_prompt, a_request, a_worker, release

PROMPT = a_prompt(blocks=6)
LIMITS = Limits(requests_per_minute=10**6, tokens_per_minute=10**6, max_concurrent=10**6)
WORKERS = [a_worker(f"{role[0]}{n}", role) for role in ("prefill", "decode") for n in (0, 1)]
TEXTS: tuple[bytes, ...] = (
    b"", b"abc", b"\xff\xfe\x00", b"-1", b"nan", b"-inf", b"inf", b"1e400", b"9" * 40, b"0x1p5", b"1:nonsense", b"|", b",,|",
    b"x" * (1 << 20), b"\x91" * 4000, b"\xc1", b"\x80", b"7:1:1000:16:" + b"y" * 33, b"1:1:1:0:", b"nobody@1", b"d0@", b"p0|x",
)  # fmt: skip
TYPES = ("string", "hash", "list", "set", "zset")

Damage = tuple[str, Callable[[redis.asyncio.Redis, bytes], Awaitable[Any]]]


@dataclass
class World:
    """A fleet with blocks, charges and tenants, and whoever calls."""

    raw: redis.asyncio.Redis
    store: FleetStore
    ledger: Ledger
    budgets: SharedBudgets

    async def build(self) -> None:
        await self.raw.flushall()
        self.budgets = SharedBudgets(self.store)  # type: ignore[arg-type]
        await self.enter_all()
        for state in WORKERS[::2]:
            await self.store.announce(state.worker, 1, PROMPT[:4], [])
        for name in ("before", "again"):
            await self.ledger.place(a_request(name, digests=PROMPT, cut_over_tokens=0))
            await self.budgets.take("acme", LIMITS, name, tokens=10, ttl_s=60)
        await self.raw.set("baton:news:p1", b"1:1:1:16:" + PROMPT[0])

    async def enter_all(self) -> list[str]:
        return await self.ledger.enter(WORKERS, gateway="gateway", ttl_ms=TTL_MS)

    async def use_all(self) -> bool:
        """Call every function once, as gateways do. Whether Redis placed the request. Any error but "no worker" is one."""
        placed = await self.place()
        await release(self.ledger, "before", 1, stage="all", workers=["p0", "d1", "nobody", "no id at all"])
        for state in WORKERS:
            stage: Any = str(state.roles[0])
            assert 0 <= await self.ledger.charged(state.worker, stage) <= 10**15
        await self.ledger.take_news([*(state.worker for state in WORKERS), "nobody", "no id at all"])
        grant = await self.budgets.take("acme", LIMITS, "now", tokens=10, ttl_s=60)
        assert (grant.refused in ("", "requests", "tokens"), grant.counted_here) == (True, False)
        await self.budgets.renew()
        left = (await self.budgets.left({"acme": LIMITS}))["acme"]
        assert left.running >= 0
        await self.budgets.settle(grant, used=3)
        assert await self.enter_all() == []
        await self.ledger.leave("p1", 2)
        return placed

    async def place(self) -> bool:
        try:
            await self.ledger.place(a_request("now", digests=PROMPT, cut_over_tokens=0))
        except UnavailableError as error:
            if error.message != "no decode worker":
                raise
            return False
        return True

    async def survive(self, key: bytes, damage: Damage) -> None:
        """One damage to a fresh world is survived, mended, and costs nobody but the key's own worker its place."""
        name, change = damage
        await self.build()
        await change(self.raw, key)
        try:
            placed = await self.use_all()
            await self.check_healed()
        except Exception as error:
            error.add_note(f"{key!r} is {name}")
            raise
        assert placed or not own_worker(key), (key, name)  # the others have their places

    async def check_healed(self) -> None:
        """What workers and gateways say again mends what was damaged."""
        await release(self.ledger, "now", 1, stage="all")
        assert (await self.ledger.place(a_request("after", digests=PROMPT))).prefill in {one.worker for one in WORKERS}


def damages(kind: str, fields: list[bytes]) -> Iterator[Damage]:
    """Other types, and nonsense of the key's own."""
    for other in TYPES:
        if other != kind:
            yield f"a {other}", _becomes(other)
    for text in TEXTS:
        name = f"{text[:12]!r}"
        if kind == "string":
            yield name, lambda raw, key, text=text: raw.set(key, text)  # type: ignore[misc]
        elif kind == "hash":
            for one in fields:
                yield f"{one[:12]!r} = {name}", lambda raw, key, one=one, text=text: raw.hset(key, one, text)  # type: ignore[misc]
        elif kind == "set":
            yield f"with {name}", lambda raw, key, text=text: raw.sadd(key, text)  # type: ignore[misc]
        elif kind == "zset":
            for score in ("-inf", "inf", 0):
                yield f"with {name} at {score}", lambda raw, key, text=text, score=score: raw.zadd(key, {text: score})  # type: ignore[misc]
    if kind == "hash":
        for one in fields:
            yield f"without {one[:12]!r}", lambda raw, key, one=one: raw.hdel(key, one)  # type: ignore[misc]
    yield "gone", lambda raw, key: raw.delete(key)


def _becomes(kind: str) -> Callable[[redis.asyncio.Redis, bytes], Awaitable[Any]]:
    async def change(raw: redis.asyncio.Redis, key: bytes) -> None:
        await raw.delete(key)
        match kind:
            case "string":
                await raw.set(key, b"\xffno")
            case "hash":
                await raw.hset(key, "a", "b")
            case "list":
                await raw.rpush(key, "a", "b")
            case "set":
                await raw.sadd(key, "a", b"\xff")
            case "zset":
                await raw.zadd(key, {"a": 1, b"\xff": float("inf")})

    return change


async def all_damages(raw: redis.asyncio.Redis) -> list[tuple[bytes, Damage]]:
    """Of every key that there is now."""
    found = []
    for key in sorted([key async for key in raw.scan_iter("baton:*")]):
        kind = (await raw.type(key)).decode()
        fields = sorted(await raw.hkeys(key)) if kind == "hash" else []
        found += [(key, damage) for damage in damages(kind, fields)]
    return found


def own_worker(key: bytes) -> str:
    """Whose key it is, if it is one worker's alone."""
    name = key.rpartition(b":")[2].decode(errors="replace")
    return name if name in {state.worker for state in WORKERS} and b":load:busy:" not in key else ""
