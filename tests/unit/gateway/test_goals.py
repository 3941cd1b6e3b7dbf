"""When an answer is good: what requests, tenants and the gateway say of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.messages import NO_GOAL, Goal
from common.settings import ConfigError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.observe.attainment import ServiceLevels
from gateway.tenants.tenants import Tenants
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

NAMES = {"chat/completions": {"messages": [{"role": "user", "content": "Hello"}]}, "completions": {"prompt": "Hello"}}
KEY = "a-key-of-the-tenant"


async def ask(gateway: Gateway, said: dict[str, Any], *, route: str = "completions", key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await gateway.http.post(f"/v1/{route}", json={"model": MODEL} | NAMES[route] | said, headers=headers)


def test_a_goal_is_completed_by_another_one() -> None:
    usual = Goal(ttft_ms=1000.0, ttft_ms_per_token=0.0, tpot_ms=50.0)
    assert Goal(tpot_ms=20.0).or_else(usual) == Goal(ttft_ms=1000.0, ttft_ms_per_token=0.0, tpot_ms=20.0)
    assert NO_GOAL.or_else(usual) == usual


def test_a_long_prompt_may_take_longer() -> None:
    goal = Goal(ttft_ms=200.0, ttft_ms_per_token=0.1, tpot_ms=20.0)
    assert [goal.ttft_s(tokens) for tokens in (0, 1000)] == [0.2, 0.3]
    assert goal.tpot_s == 0.02
    assert (NO_GOAL.ttft_s(1000), NO_GOAL.tpot_s) == (math.inf, math.inf)
    assert Goal(ttft_ms_per_token=0.1).ttft_s(1000) == math.inf


@pytest.mark.parametrize("route", NAMES)
async def test_a_request_s_goal_precedes_its_tenant_s_and_that_the_gateway_s(
    tokenizer: ChatTokenizer, tmp_path: Path, route: str
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenants.acme]\nkeys = ["{KEY}"]\nttft_slo_ms = 300\ntpot_slo_ms = 30\n')
    levels = ServiceLevels(ttft_s=1.0, ttft_s_per_token=0.001, tpot_s=0.05)
    settings = HttpSettings(tenants=Tenants(path=path), levels=levels)
    async with run_gateway(tokenizer, settings) as gateway:
        assert (await ask(gateway, {"ttft_slo_ms": 100.5}, route=route, key=KEY)).status_code == 200
        assert (await ask(gateway, {"priority": -1, "tpot_slo_ms": 9}, route=route, key=KEY)).status_code == 200
        goals = [spec.goal for spec in gateway.script.submitted]
    assert goals == [Goal(ttft_ms=100.5, ttft_ms_per_token=1.0, tpot_ms=30.0), NO_GOAL]  # the lowest tier has none


async def test_a_goal_of_its_own_or_its_tenant_s_is_needed_where_a_gateway_admits_by_goals(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[tenants.acme]\nkeys = ["{KEY}"]\nttft_slo_ms = 300\n\n[tenants.other]\nkeys = ["another-key-of-one"]\n'
    )
    needed = {}
    for by_goals in (False, True):
        settings = HttpSettings(tenants=Tenants(path=path), levels=ServiceLevels(), admits_by_goals=by_goals)
        async with run_gateway(tokenizer, settings) as gateway:
            for said in ({}, {"ttft_slo_ms": 100}, {"tpot_slo_ms": 100}):
                await ask(gateway, said, key="another-key-of-one")
            await ask(gateway, {}, key=KEY)
            needed[by_goals] = [spec.aim.is_needed for spec in gateway.script.submitted]
    assert needed == {False: [False] * 4, True: [False, True, False, True]}


@pytest.mark.parametrize(
    "said",
    [
        {"ttft_slo_ms": 0},
        {"ttft_slo_ms": "200"},
        {"ttft_slo_ms_per_token": -1},
        {"tpot_slo_ms": True},
        {"tpot_slo_ms": 3_600_001},
    ],
    ids=str,
)
async def test_a_wrong_goal_is_refused_by_name(gateway: Gateway, said: dict[str, Any]) -> None:
    answer = await ask(gateway, said)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(said)))
    assert gateway.script.submitted == []


def test_a_wrong_goal_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.acme]\nttft_slo_ms = 0\n")
    with pytest.raises(ConfigError, match=r"tenants\.acme\.ttft_slo_ms"):
        Tenants(path=path)
