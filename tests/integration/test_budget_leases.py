"""A charge is a lease: it lives as long as its gateway renews it, and what a dead one reserved comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio

from common.store import Store, connect_store
from gateway.tenants import budgets
from gateway.tenants.budgets import Grant, Limits, SharedBudgets, budgets_library
from tests.integration.fleet import patient
from tests.integration.waiting import LIMIT_S, eventually

LIMITS = Limits(requests_per_minute=1000, tokens_per_minute=1000, max_concurrent=2)
LEASE_MS = 10_000
# 0.1.0's `baton_budget_take`, as far as requests in flight go.
TAKE_OF_0_1_0 = """#!lua name=baton_budgets
redis.register_function('baton_budget_take', function(_, args)
  local running, now = 'baton:running:' .. args[1], tonumber(args[4])
  redis.call('ZREMRANGEBYSCORE', running, '-inf', now)
  if redis.call('ZCARD', running) >= tonumber(args[3]) then return 'concurrent' end
  redis.call('ZADD', running, now + 3600000, args[2])
  redis.call('PEXPIRE', running, 3600000)
  return ''
end)"""


@dataclass
class Counter:
    """The functions at instants of a made-up clock."""

    raw: redis.asyncio.Redis
    now: int = 10**12
    limits: Limits = LIMITS

    async def take(self, request: str, tokens: int = 100) -> tuple[str, int]:
        """The refusal and the tokens that are left."""
        minute = self.limits.requests_per_minute, self.limits.tokens_per_minute
        answer: Any = await self._call("take", "acme", request, tokens, *minute, 2, LEASE_MS, self.now)
        return answer[0].decode(), answer[3]

    async def settle(self, request: str, *, used: int, told: int = 0, tokens: int = 100) -> None:
        await self._call("settle", "acme", request, 0, tokens, used, told, 1000, 1000, self.now)

    async def renew(self, *requests: str, reserved: int) -> None:
        told = [part for request in requests for part in ("acme", request, reserved, 1, 1000, 1000)]
        await self._call("renew", LEASE_MS, self.now, *told)

    async def left(self) -> tuple[int, int]:
        """Tokens left, and requests in flight."""
        ((_, tokens, running),) = await self._call("left", self.now, "acme", 1000, 1000)
        return tokens, running

    async def _call(self, function: str, *args: Any) -> Any:
        return await self.raw.fcall(f"baton2_budget_{function}", 0, *args)


@pytest.fixture
async def counter(raw: redis.asyncio.Redis) -> Counter:
    await raw.function_load(budgets_library(), replace=True)
    return Counter(raw)


@pytest.fixture
async def full(counter: Counter) -> Counter:
    """A tenant with as many requests as it may have, each with 100 tokens reserved, 30 of them used."""
    for request in ("a", "b"):
        assert (await counter.take(request))[0] == ""
    await counter.renew("a", "b", reserved=70)
    assert (await counter.take("c"))[0] == "concurrent"
    assert await counter.left() == (800, 2)
    return counter


async def test_what_a_dead_gateway_held_goes_with_its_lease(full: Counter) -> None:
    full.now += LEASE_MS
    tokens, running = await full.left()
    refilled = 1000 * LEASE_MS // 60_000
    assert (tokens, running) == (min(1000, 800 + refilled + 140), 0)  # 30 of each were used, and stay so
    assert await full.take("c") == ("", tokens - 100)
    assert await full.left() == (tokens - 100, 1)  # the same tokens come back once


async def test_what_is_renewed_stays(full: Counter) -> None:
    for _ in range(10):
        full.now += LEASE_MS - 1
        await full.renew("a", "b", reserved=70)
    assert (await full.take("c"))[0] == "concurrent"
    await full.settle("a", used=100, told=30)
    assert (await full.take("c"))[0] == ""


@pytest.mark.parametrize("swept", [False, True])
async def test_a_gateway_that_stood_still_is_charged_again_and_gives_back_once(counter: Counter, swept: bool) -> None:
    await counter.take("a", 900)
    await counter.renew("a", reserved=850)
    counter.now += LEASE_MS
    refilled = 1000 * LEASE_MS // 60_000
    if swept:
        assert await counter.take("b", 100) == ("", 1000 - 100)  # another gateway's: `a` gave 850 back
        await counter.settle("b", used=0)
    before = 1000 if swept else 100 + refilled + 850
    assert (await counter.left())[0] == min(1000, before)
    await counter.renew("a", reserved=850)
    assert await counter.left() == (min(1000, before) - 850, 1)
    await counter.settle("a", used=60, told=50, tokens=900)
    assert await counter.left() == (min(1000, before) - 10, 0)  # used between the two renewals


async def test_what_ends_after_its_lease_costs_what_was_used_since(counter: Counter) -> None:
    await counter.take("a", 900)
    await counter.renew("a", reserved=850)
    counter.now += LEASE_MS
    before, _ = await counter.left()
    for _ in range(2):
        await counter.settle("a", used=60, told=50, tokens=900)
    assert await counter.left() == (before - 20, 0)  # twice: a settlement that comes again costs, and never gives


async def test_a_redis_that_lost_everything_learns_it_from_the_next_renewal(
    full: Counter, raw: redis.asyncio.Redis
) -> None:
    await raw.flushall()
    assert await full.left() == (1000, 0)
    await full.renew("a", "b", reserved=70)
    assert await full.left() == (860, 2)
    assert (await full.take("c"))[0] == "concurrent"


async def test_gateways_of_0_1_0_and_of_now_count_each_other_s_requests(
    counter: Counter, raw: redis.asyncio.Redis
) -> None:
    await raw.function_load(TAKE_OF_0_1_0, replace=True)

    async def old(request: str) -> bytes:
        return await raw.fcall("baton_budget_take", 0, "acme", request, 2, counter.now)  # type: ignore[no-any-return]

    assert (await counter.take("new"))[0] == ""
    assert await old("old") == b""
    assert (await counter.take("another"))[0] == "concurrent"
    assert await old("another") == b"concurrent"
    assert await raw.pttl("baton:running:acme") > 3_000_000  # ours does not shorten theirs
    counter.now += LEASE_MS
    assert await old("another") == b""
    assert (await counter.left())[1] == 2


async def test_nothing_of_a_tenant_stays_for_ever(full: Counter, raw: redis.asyncio.Redis) -> None:
    full.now += LEASE_MS
    await full.take("c")
    await full.renew("d", reserved=5)
    found = {key: await raw.pttl(key) async for key in raw.scan_iter("baton:*")}
    assert len(found) == 4
    assert all(0 < ttl <= 120_000 for ttl in found.values()), found


# -- gateways ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def shared(redis_url: str, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr(budgets, "TAKE_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(budgets, "SETTLE_TIMEOUT_S", LIMIT_S)
    async with connect_store(patient(redis_url), libraries=(budgets_library(),)) as store:
        yield store


async def take(gateway: SharedBudgets, name: str, *, limit: int = 1) -> Grant:
    return await gateway.take("acme", Limits(max_concurrent=limit), name, tokens=10, ttl_s=3600)


async def test_a_gateway_that_dies_frees_its_tenants_and_one_that_lives_does_not(
    shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "LEASE_S", 3.0)  # thirty times
    monkeypatch.setattr(budgets, "RENEW_S", 0.1)
    gateways = [SharedBudgets(shared) for _ in range(3)]
    async with gateways[0].renewing():
        async with gateways[1].renewing():
            for gateway, name in zip(gateways, ("lives", "dies"), strict=False):
                assert (await take(gateway, name, limit=2)).refused == ""
            assert (await take(gateways[2], "next", limit=2)).refused == "concurrent"

        async def next_one() -> bool:
            return (await take(gateways[2], "next", limit=2)).refused == ""

        await eventually(next_one)
        left = (await gateways[0].left({"acme": LIMITS}))["acme"]
        assert left.running == 2  # the living one's, and the next one


async def test_what_began_while_redis_was_away_counts_when_it_is_back(shared: Store) -> None:
    alone, other = SharedBudgets(shared), SharedBudgets(shared)
    there, shared.call = shared.call, shared_is_away  # type: ignore[method-assign,assignment]
    grant = await take(alone, "a")
    assert grant.counted_here
    shared.call = there  # type: ignore[method-assign]
    await alone.renew()
    assert (await take(other, "b")).refused == "concurrent"
    await alone.settle(grant, used=3)
    assert (await take(other, "b")).refused == ""


async def shared_is_away(*_: Any, **__: Any) -> Any:
    raise budgets.UnavailableError("away")


async def test_a_renewal_on_its_way_brings_nothing_back_that_was_settled(shared: Store) -> None:
    here, other = SharedBudgets(shared), SharedBudgets(shared)
    grant = await take(here, "a")
    await asyncio.gather(here.renew(), here.settle(grant, used=1), here.renew())
    assert (await take(other, "b")).refused == ""


async def test_nothing_is_settled_before_the_last_renewal_that_may_tell_of_it(shared: Store) -> None:
    here, other = SharedBudgets(shared), SharedBudgets(shared)
    grant = await take(here, "a")
    there, gates = shared.call, [asyncio.Event(), asyncio.Event()]
    waiting = iter(gates)

    async def slowly(function: str, *args: Any, **limits: Any) -> Any:
        if function == "baton2_budget_renew":
            await next(waiting).wait()
        return await there(function, *args, **limits)

    shared.call = slowly  # type: ignore[method-assign]
    renewals = [asyncio.create_task(here.renew()) for _ in gates]
    settling = asyncio.create_task(here.settle(grant, used=1))
    for gate in gates:
        gate.set()
        await asyncio.wait([renewals[0], settling])
    await asyncio.gather(*renewals, settling)
    assert (await take(other, "b")).refused == ""


async def test_a_redis_that_hangs_is_renewed_once_and_holds_nobody_up(
    shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "TAKE_TIMEOUT_S", 0.01)
    now, calls, answers = 0.0, [], asyncio.Event()
    gateway = SharedBudgets(shared, clock=lambda: now)
    shared.call = shared_is_away  # type: ignore[method-assign,assignment]
    await take(gateway, "a", limit=10)

    async def hangs(function: str, *_: Any, timeout_s: float) -> Any:
        calls.append(function)
        if timeout_s > budgets.TAKE_TIMEOUT_S:
            await answers.wait()
        raise budgets.UnavailableError("hung")

    shared.call = hangs  # type: ignore[method-assign]
    now += budgets.LEASE_S + 1
    async with asyncio.timeout(LIMIT_S):
        grants = await asyncio.gather(*(take(gateway, f"{number}", limit=10) for number in range(5)))
    assert all(grant.counted_here and not grant.refused for grant in grants)
    assert calls == ["baton2_budget_renew"]
    answers.set()
    await gateway.renew()


async def test_a_gateway_that_stood_still_counts_what_it_runs_before_it_takes_more(
    shared: Store, raw: redis.asyncio.Redis
) -> None:
    now = 0.0
    still = SharedBudgets(shared, clock=lambda: now)
    await take(still, "a")
    await raw.delete("baton:running:acme", "baton:leased:acme", "baton:reserved:acme")  # as when its lease ended
    now += budgets.LEASE_S + 1
    assert (await take(still, "b")).refused == "concurrent"


@pytest.mark.parametrize(
    "answer", [b"x", [], [b"\xff", 1, 2, 3, 4, 5], [b"", b"nan", 1, 2, 3, 4], [b"who", 0, 0, 0, 0, 0]]
)
async def test_an_answer_that_is_none_counts_here(shared: Store, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def call(*_: Any, **__: Any) -> Any:
        return answer

    shared.call = call  # type: ignore[method-assign]
    gateway = SharedBudgets(shared)
    assert (await take(gateway, "a")).counted_here
    assert (await take(gateway, "b")).refused == "concurrent"
    assert (await gateway.left({"acme": LIMITS}))["acme"].running == 1
    assert [record.message for record in caplog.records].count("budgets.unreadable_answer") == 1
