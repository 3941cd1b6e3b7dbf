"""Nothing that is stored in Redis makes a function loop or fail, and one bad record costs one worker its place."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
import redis.asyncio
import redis.exceptions

from common.errors import MalformedMessageError, UnavailableError
from common.messages import WorkerState, decode, encode, worker_state_decoder
from common.peers import Peers
from common.store import record_of
from gateway.placement.enrolment import Enrolment
from gateway.placement.ledger import Ledger, placement_library
from gateway.tenants import budgets
from gateway.tenants.budgets import SharedBudgets
from tests.integration.fleet import KIND, TTL_MS, FleetStore, a_prompt, a_request, a_worker, two_and_two
from tests.integration.hostile import WORKERS, World, all_damages
from tests.integration.waiting import LIMIT_S, eventually

QUICK = 40  # damages of some hundred; tests/fuzz tries all, and several at once
GHOSTS = 20_000


@pytest.fixture
async def world(raw: redis.asyncio.Redis, store: FleetStore, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(budgets, "TAKE_TIMEOUT_S", LIMIT_S)
    world = World(raw, store, ledger, SharedBudgets(store))  # type: ignore[arg-type]
    await world.build()
    return world


async def test_every_damage_to_a_key_is_survived_and_mended(world: World) -> None:
    every = await all_damages(world.raw)
    for key, damage in random.Random(20261122).sample(every, QUICK):
        await world.survive(key, damage)


async def test_names_without_a_worker_behind_them_end_nobody_s_placement(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    """Once such a name made the server loop for ever, and no `FUNCTION KILL` could end it."""
    await two_and_two(store)
    key = f"baton:ready:decode:{KIND}"
    await raw.zadd(key, {"ghost": -1, "d9": -2, b"\xff": -3, "": -4})
    assert (await ledger.place(a_request())).decode
    assert await raw.zcard(key) == 2
    await raw.zadd(key, {f"ghost{n}": -1 for n in range(GHOSTS)})
    with pytest.raises(UnavailableError, match="no decode worker"):  # the gateway chooses by heartbeats
        await ledger.place(a_request("another"))
    assert 0 < GHOSTS + 2 - await raw.zcard(key) <= 128


async def test_dead_holders_without_end_hide_nobody_for_long(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p1", 1, prompt, [])
    for digest in prompt:
        await raw.sadd(b"baton:block:" + digest, *(f"ghost{n}@1" for n in range(500)), b"\xff", "p1@x", "@", "p1@2")

    async def found() -> bool:
        placement = await ledger.place(a_request(digests=prompt))
        return placement.matched_blocks_prefill == 4

    await eventually(found)


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": b"abc"}, {"incarnation": b"-1"}, {"incarnation": b"9" * 30}, {"incarnation": b"\xff"},
        {"record": b"\xff"}, {"record": b""}, {"record": b"\x80"}, {"record": b"\x91" * 3000}, {"record": b"\xa1" * 5000},
    ],
)  # fmt: skip
async def test_a_worker_whose_entry_is_nonsense_loses_its_place_and_nobody_else_does(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis, change: dict[str, bytes]
) -> None:
    await two_and_two(store)
    for worker in ("d0", "p0"):
        await raw.hset(f"baton:worker:{worker}", mapping=change)  # type: ignore[arg-type]
    for number in range(3):
        placement = await ledger.place(a_request(f"request-{number}"))
        assert (placement.prefill, placement.decode) == ("p1", ["d1"])
    await two_and_two(store)  # their next heartbeats
    assert (await ledger.place(a_request())).costs["candidates"] == 4


def records() -> dict[str, Any]:
    """Records that no worker may have, by what is wrong with them."""
    record = msgspec.to_builtins(record_of(a_worker("d0", "decode")))
    found: dict[str, Any] = {"no map": [1], "nothing": None, "long": record | {"more": "x" * 5000}}
    for name in record:
        if name not in (
            "tiers",
            "host_bytes_per_s",
            "disk_bytes_per_s",
            "pull_bytes_per_s",
        ):  # older builds say none of them
            found[f"{name} missing"] = {key: value for key, value in record.items() if key != name}
        if name != "status":  # a later release may have others
            found[f"{name} a text"] = record | {name: "\n" * 300}
        if isinstance(record[name], (int, float)):
            for value in (-1, float("nan"), float("inf"), 1e300, "12", True):
                found[f"{name} {value}"] = record | {name: value}
    for name, value in (("kind", "k" * 300), ("roles", ["decode"] * 9), ("roles", ["r" * 40]), ("roles", [1])):
        found[f"{name} {value!s:.20}"] = record | {name: value}
    return found


async def test_a_record_with_any_wrong_figure_is_refused_by_name(ledger: Ledger, raw: redis.asyncio.Redis) -> None:
    call = ["baton4_enter", 0, "gateway", TTL_MS, 0]
    await ledger.enter([], gateway="gateway")
    for what, record in records().items():
        packed = msgspec.msgpack.encode(record)
        assert await raw.fcall(*call, "d0", "1", packed) == [b"d0"], what  # type: ignore[misc]
    good = msgspec.msgpack.encode(record_of(a_worker("d0", "decode")))
    for name, number in ((b"\xff", "1"), ("", "1"), ("a b", "1"), ("a" * 65, "1"), ("d0", "abc"), ("d0", "")):
        assert await raw.fcall(*call, name, number, good) != [], (name, number)  # type: ignore[misc]
    assert [key async for key in raw.scan_iter("baton:*")] == []
    assert await raw.fcall(*call, "d0", "1", good) == []  # type: ignore[misc]


async def test_a_call_that_takes_too_long_can_be_killed_and_has_changed_nothing(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis, redis_url: str
) -> None:
    await two_and_two(store)
    endless = placement_library().replace("  local predicted =", "  while true do end\n  local predicted =")
    await raw.function_load(endless, replace=True)

    async def everything() -> list[bytes]:
        return sorted([key async for key in raw.scan_iter("baton:*")])  # a placement adds charges

    before = await everything()
    try:
        async with redis.asyncio.Redis.from_url(redis_url) as other:
            placing = asyncio.create_task(ledger.place(a_request()))

            async def killed() -> bool:
                try:
                    return bool(await other.execute_command("FUNCTION KILL"))
                except redis.exceptions.ResponseError:
                    return False  # it has not begun, or not for long

            await eventually(killed)
            with pytest.raises(UnavailableError, match=r"(?i)kill"):
                await placing
        assert await everything() == before
    finally:
        await raw.function_load(placement_library(), replace=True)


@pytest.mark.parametrize("answer", [b"x", [], [b"\xff", b"1", 0, 0, b"load", b""], [b"p0", b"abc", 0, 0, b"load", b""]])
async def test_an_answer_that_is_none_is_told_once(
    store: FleetStore, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Liar:
        async def call(self, *_: Any, **__: Any) -> Any:
            return answer

    ledger = Ledger(Liar())  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(UnavailableError, match="nonsense"):
            await ledger.place(a_request())
    assert [record.message for record in caplog.records].count("placement.unreadable_answer") == 1


def with_layout(**odd: Any) -> WorkerState:
    state = a_worker("bad", "decode")
    layout = msgspec.structs.replace(state.region.layout, **odd)
    return msgspec.structs.replace(state, region=msgspec.structs.replace(state.region, layout=layout))


@pytest.mark.parametrize(
    "bad",
    [
        a_worker("bad", "decode", decode_step_ms=float("nan")), a_worker("bad", "decode", free_blocks=-1),
        with_layout(dtype="of the future"), with_layout(num_layers=2**62), a_worker("no id", "decode"),
    ],
)  # fmt: skip
async def test_a_heartbeat_with_figures_that_are_none_is_told_once_and_keeps_nobody_out(
    bad: WorkerState, ledger: Ledger, store: FleetStore, raw: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    peers = Peers()
    enrolment = Enrolment(ledger, peers, gateway_id="gateway")
    states: list[WorkerState] = [*WORKERS, bad]
    for state in states:
        peers.saw(state)
    for _ in range(3):
        await enrolment.enter()
    assert await raw.smembers("baton:workers") == {state.worker.encode() for state in WORKERS}
    assert [record.message for record in caplog.records].count("placement.worker_refused") == 1
    assert (await ledger.place(a_request())).decode


@pytest.mark.parametrize(
    "odd", [{"block_size": 0}, {"block_size": -1}, {"block_size": 10**9}, {"num_blocks": -1}, {"num_layers": 2**40}]
)
def test_a_heartbeat_that_gateways_can_t_compute_with_is_no_message(odd: dict[str, int]) -> None:
    """With blocks of 0 every request failed; with large ones the hash of the probe took all memory."""
    with pytest.raises(MalformedMessageError):
        decode(worker_state_decoder, encode(with_layout(**odd)))
