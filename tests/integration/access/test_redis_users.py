"""Users of Redis against the real server: each role can do its work and nothing more."""

from __future__ import annotations

import pytest
import redis.asyncio
import redis.exceptions

from gateway.tenants.budgets import budgets_library
from tests.integration.access.deployment import REFUSED, Deployment

REDIS_REFUSED: dict[str, list[tuple[object, ...]]] = {
    "gateway-0": [
        ("FCALL", "baton3_register", 0, "w", "1", 1000),
        ("FCALL", "baton3_announce", 0, "w@1", 0),
        ("SET", "baton:worker:w", "x"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("EVAL", "return 1", 0),
        ("FUNCTION", "DELETE", "baton3"),
        ("ACL", "LIST"),
        ("GET", "somebody:else"),
    ],
    "decode-0": [
        ("FCALL", "baton3_place", 0, "r:1"),
        ("FCALL", "baton3_release", 0, "r:1", "prefill"),
        ("FCALL", "baton3_states", 0),
        ("FCALL", "baton3_register", 0, "prefill-0", "1", 1000, 0, "x", b"\x80"),
        ("FCALL", "baton3_unregister", 0, "prefill-0", "1"),
        ("FUNCTION", "LOAD", "REPLACE", "#!lua name=baton3\nredis.register_function('baton3_place', function() end)"),
        ("HGET", "baton:worker:prefill-0", "state"),
        ("FLUSHALL",),
        ("SMEMBERS", "baton:workers"),
        ("GET", "baton:load:decode:prefill-0"),
    ],
    "planner": [
        ("FCALL", "baton3_place", 0, "r:1"),
        ("FCALL", "baton_states", 0),
        ("DEL", "baton:workers"),
        ("FLUSHALL",),
    ],
    "observer": [("FCALL", "baton3_states", 0), ("SMEMBERS", "baton:workers"), ("CONFIG", "GET", "*")],
}


@pytest.mark.parametrize("user", REDIS_REFUSED)
async def test_a_redis_user_may_do_nothing_beyond_its_role(deployment: Deployment, user: str) -> None:
    async with deployment.redis_as(user) as client:
        for command in REDIS_REFUSED[user]:
            with pytest.raises(redis.exceptions.ResponseError, match=REFUSED):
                await client.execute_command(*command)


async def test_a_gateway_s_user_counts_budgets(deployment: Deployment) -> None:
    async with deployment.redis_as("gateway-0") as client:
        await client.function_load(budgets_library(), replace=True)
        for left in (1, 0):
            answer = await client.fcall("baton2_budget_take", 0, "acme", f"r{left}", 5, 2, 100, 3, 60_000, 0)
            assert (answer[0], answer[2]) == (b"", left)
        assert await client.fcall("baton2_budget_settle", 0, "acme", "r0", 0, 5, 2, 0, 2, 100, 0) == 1


async def test_redis_knows_nobody_without_a_password(deployment: Deployment) -> None:
    async with redis.asyncio.Redis.from_url(deployment.redis.address, protocol=2) as client:
        with pytest.raises(redis.exceptions.AuthenticationError):
            await client.execute_command("PING")
