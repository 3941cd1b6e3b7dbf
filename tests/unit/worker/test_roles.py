"""Which roles of a worker take new work, with the real roles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.messages import SamplingParams
from decode.role import DecodeRole
from prefill.role import PrefillRole
from tests.unit.decode.stub_host import StubHost, claim, new_fake_engine, new_job
from worker.roles import Roles


@pytest.fixture
async def host() -> AsyncIterator[StubHost]:
    host = StubHost(new_fake_engine(16), token_budget=8)
    yield host
    for task in list(host.tasks):
        task.cancel()


def worker(host: StubHost, *active: str, hands_over: bool = True) -> tuple[Roles, DecodeRole]:
    roles = Roles(hands_over=lambda: hands_over)
    decode = DecodeRole(cast(Any, host))
    roles.attach(decode, active="decode" in active)
    roles.attach(PrefillRole(cast(Any, host), max_requests=4), active="prefill" in active)
    return roles, decode


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ([], "no role is given"),
        (["encode"], "choose from decode, prefill"),
        (["prefill", "encode"], "'encode'"),
        (["prefill"], "transport"),
        (["decode"], ""),
        (["prefill", "decode"], ""),
    ],
)
async def test_a_worker_without_peers_refuses_what_it_can_t_be(host: StubHost, wanted: list[str], reason: str) -> None:
    roles, _ = worker(host, "decode", hands_over=False)
    refusal = roles.refusal(wanted)
    assert reason in refusal
    assert bool(refusal) == bool(reason)


async def test_a_lost_role_retires_until_what_it_began_is_over_and_can_come_back_meanwhile(host: StubHost) -> None:
    roles, decode = worker(host, "decode")
    await decode.start(claim(new_job("r", [1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))))

    assert await roles.change(["prefill"])
    assert roles.names == ["prefill"]
    assert roles.retiring == [decode]
    assert decode in roles.all  # its sequence is part of the passes
    assert await roles.change(["prefill", "decode"])
    assert roles.names == ["decode", "prefill"]
    assert roles.retiring == []

    await roles.change(["prefill"])
    for _ in range(2):
        chunks = decode.plan(8)
        decode.apply(list(zip(chunks, host.engine.launch(chunks).wait(), strict=True)))
    assert host.ended["r"] == "length"
    assert roles.retiring == []


async def test_the_same_roles_again_change_nothing(host: StubHost) -> None:
    roles, _ = worker(host, "decode")
    assert not await roles.change(["decode"])
    assert await roles.change(["decode", "prefill"])
    assert not await roles.change(["prefill", "decode", "prefill"])


async def test_links_are_open_before_prompts_may_come(host: StubHost) -> None:
    roles, _ = worker(host, "decode")
    seen: list[tuple[str, list[str]]] = []

    async def connect(region: str) -> Any:
        seen.append((region, roles.names))
        return SimpleNamespace(bandwidth=1e9)

    host.transport = SimpleNamespace(connect=connect)  # type: ignore[attr-defined]
    host.link_bytes_per_s = 0.0  # type: ignore[attr-defined]
    host.peers.states = {name: SimpleNamespace(worker=name, region=name) for name in ("w", "a", "b")}

    await roles.change(["prefill"])

    assert seen == [("a", ["decode"]), ("b", ["decode"])]
