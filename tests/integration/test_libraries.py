"""Releases of nats-py and redis-py that renamed what is overridden: their own way serves, and the log says what is lost."""

from __future__ import annotations

import asyncio
import inspect
import logging
from types import CodeType, ModuleType

import nats.aio.client
import pytest
import redis.asyncio.connection

from common.bus import NatsBus, NatsSettings, connect_bus
from common.store import connect_store
from gateway.placement.ledger import function_libraries
from tests.integration.conftest import patient_ledger
from tests.integration.fleet import FleetStore, a_request, patient, two_and_two
from tests.integration.waiting import LIMIT_S


def renamed(code: CodeType, old: str, new: str) -> CodeType:
    names = tuple(new if name == old else name for name in code.co_names)
    consts = tuple(
        renamed(one, old, new) if isinstance(one, CodeType) else new if isinstance(one, str) and one == old else one
        for one in code.co_consts
    )
    return code.replace(co_names=names, co_consts=consts)


def rename(monkeypatch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> None:
    """The module's classes as a release would be that has `new` in place of `old`."""
    for _, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ != module.__name__:
            continue
        for member in list(vars(kind).values()):
            for function in (member.fget, member.fset) if isinstance(member, property) else (member,):
                if inspect.isfunction(function):
                    own = inspect.unwrap(function)  # without its decorators
                    monkeypatch.setattr(own, "__code__", renamed(own.__code__, old, new))
        if old in vars(kind):  # a method, or a slot
            monkeypatch.setattr(kind, new, vars(kind)[old], raising=False)
            monkeypatch.delattr(kind, old)


def told(caplog: pytest.LogCaptureFixture, event: str) -> tuple[str, list[str]]:
    [record] = [record for record in caplog.records if record.msg == event]
    assert record.levelno == logging.WARNING
    fields = record.__dict__
    assert fields["version"]
    assert "speed" in fields["lost"]
    return fields["library"], fields["lacks"]


@pytest.mark.parametrize("name", ["_resp_map", "_process_headers", "_init_request_sub"])
async def test_a_bus_works_by_nats_py_s_own_way(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    rename(monkeypatch, nats.aio.client, name, "_renamed_since")
    async with connect_bus(NatsSettings(url=nats_url), name="test") as bus:
        await answers(bus)
    assert told(caplog, "bus.library_differs") == ("nats-py", [f"Client.{name}"])


async def answers(bus: NatsBus) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    await bus._client.hear("words", lambda message: heard.put_nowait(message.data.decode()))
    await bus._client.hear("asked", lambda message: bus._client.say(message.reply, b"answer"))
    await bus.flush(LIMIT_S)
    for number in range(100):
        bus._client.say("words", str(number).encode())
    assert (await bus._client.ask("asked", b"", timeout_s=LIMIT_S)).data == b"answer"
    async with asyncio.timeout(LIMIT_S):
        assert [await heard.get() for _ in range(100)] == [str(number) for number in range(100)]


async def test_a_store_works_by_redis_py_s_own_way(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename(monkeypatch, redis.asyncio.connection, "_writer", "_renamed_since")
    async with redis.asyncio.Redis.from_url(redis_url) as raw:
        await raw.flushall()
    async with connect_store(patient(redis_url), libraries=function_libraries()) as connected:
        store = FleetStore(connected)
        await two_and_two(store)
        assert (await patient_ledger(store).place(a_request())).prefill == "p0"
    assert told(caplog, "store.library_differs") == ("redis", ["AbstractConnection._writer"])


async def test_the_installed_libraries_have_all_of_it(
    nats_url: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect_bus(NatsSettings(url=nats_url), name="test") as bus, connect_store(patient(redis_url)):
        await answers(bus)
    assert not [record for record in caplog.records if record.msg.endswith("library_differs")]
