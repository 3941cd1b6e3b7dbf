"""Which roles of a worker take new work, with the real roles."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from common.messages import SamplingParams
from decode.role import DecodeRole
from prefill.role import PrefillRole
from tests.fakes.device import settled
from tests.fakes.transport import LinkingTransport
from tests.fakes.worker import Bench, claim, new_fake_engine, new_job, running_bench
from worker.roles import Roles


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running_bench(new_fake_engine(16)) as bench:
        yield bench


def worker(bench: Bench, *active: str, hands_over: bool = True) -> tuple[Roles, DecodeRole]:
    roles = Roles(hands_over=hands_over)
    decode = DecodeRole(bench.context)
    roles.attach(decode, active="decode" in active)
    roles.attach(PrefillRole(bench.context, max_requests=4), active="prefill" in active)
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
async def test_a_worker_without_peers_refuses_what_it_can_t_be(bench: Bench, wanted: list[str], reason: str) -> None:
    roles, _ = worker(bench, "decode", hands_over=False)
    refusal = roles.refusal(wanted)
    assert reason in refusal
    assert bool(refusal) == bool(reason)


async def test_a_lost_role_retires_until_what_it_began_is_over_and_can_come_back_meanwhile(bench: Bench) -> None:
    roles, decode = worker(bench, "decode")
    await decode.start(claim(new_job("r", [1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0)), bench.gateway))

    assert await roles.change(["prefill"])
    assert roles.names == ["prefill"]
    assert not decode.idle()
    assert decode in roles.all  # its sequence is part of the passes
    assert decode not in roles.active
    assert await roles.change(["prefill", "decode"])
    assert roles.names == ["decode", "prefill"]
    assert decode in roles.active

    await roles.change(["prefill"])
    for _ in range(2):
        chunks = decode.plan(8)
        decode.apply(list(zip(chunks, bench.engine.launch(chunks).wait(), strict=True)))
    await settled()
    assert bench.gateway.ended["r"] == "length"
    assert decode.idle()
    assert roles.names == ["prefill"]


async def test_the_same_roles_again_change_nothing(bench: Bench) -> None:
    roles, _ = worker(bench, "decode")
    assert not await roles.change(["decode"])
    assert await roles.change(["decode", "prefill"])
    assert not await roles.change(["prefill", "decode", "prefill"])


async def test_no_work_is_taken_unless_the_worker_is_ready(bench: Bench) -> None:
    roles, decode = worker(bench, "decode")
    for status in ("starting", "draining", "stopped", "broken"):
        roles.status = status
        assert roles.room() == 0
        assert not roles.takes("decode")
    roles.status = "ready"
    assert roles.room() == decode.room() > 0
    assert (roles.takes("decode"), roles.takes("prefill")) == (True, False)


async def test_links_are_open_before_prompts_may_come() -> None:
    seen: list[tuple[str, list[str]]] = []
    transport = LinkingTransport(lambda region: seen.append((region.address["at"], roles.names)))
    async with running_bench(new_fake_engine(16), transport=transport) as bench:
        roles, _ = worker(bench, "decode")
        for name in ("w", "a", "b"):
            bench.peers.saw(bench.state(name))

        await roles.change(["prefill"])

    assert seen == [("a", ["decode"]), ("b", ["decode"])]
    assert [role.load().link_bytes_per_s for role in roles.all] == [0.0, 1e9]  # the slowest
    [prefill] = roles.active
    prefill.worker_lost("b", 1)
    assert prefill.load().link_bytes_per_s == 2e9
