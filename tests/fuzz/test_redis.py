"""Everything that is stored in Redis, damaged in every way that there is, and in several ways at once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from hypothesis import settings

from common.store import connect_store
from gateway.placement.ledger import function_libraries
from gateway.tenants import budgets
from gateway.tenants.budgets import SharedBudgets
from tests.integration.conftest import patient_ledger
from tests.integration.fleet import FleetStore, patient
from tests.integration.hostile import World, all_damages
from tests.integration.waiting import LIMIT_S

SEEDS_AN_EXAMPLE = 0.2
AT_ONCE = 12
PARTS = 8


@pytest.fixture
async def world(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(budgets, "TAKE_TIMEOUT_S", LIMIT_S)
    async with (
        redis.asyncio.Redis.from_url(redis_url) as raw,
        connect_store(patient(redis_url), libraries=function_libraries()) as plain,
    ):
        store = FleetStore(plain)
        world = World(raw, store, patient_ledger(store), SharedBudgets(plain))
        await world.build()
        yield world


async def test_several_damages_at_once_are_survived_and_mended(world: World) -> None:
    every = await all_damages(world.raw)
    for seed in range(int(SEEDS_AN_EXAMPLE * settings().max_examples)):
        chance = random.Random(seed)
        await world.build()
        done = chance.sample(every, chance.randint(2, AT_ONCE))
        for key, (_, damage) in done:
            try:
                await damage(world.raw, key)
            except redis.exceptions.ResponseError:
                pass  # an earlier one made another type of it
        try:
            await world.use_all()
            await world.enter_all()
            await world.check_healed()
        except Exception as error:
            error.add_note(f"seed {seed}: " + ", ".join(f"{key!r} {name}" for key, (name, _) in done))
            raise


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
async def test_each_damage_alone_costs_one_worker_its_place_at_most(world: World, part: int) -> None:
    every = await all_damages(world.raw)
    assert len(every) > 500
    for key, damage in every[part::PARTS]:
        await world.survive(key, damage)
