"""The gateway's socket."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.responses import Response

from common.settings import ConfigError
from services.gateway import rpc
from services.gateway.process import serve
from services.gateway.server import listen, take_connections
from services.gateway.settings import GatewaySettings
from services.runtime.servers import held_port, port_is_free
from tests.ports import own_port


def test_nothing_that_the_gateway_sends_waits_for_an_acknowledgement() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.proto == socket.IPPROTO_TCP


def test_of_two_gateways_that_bind_at_once_one_is_told() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port) as second:
            take_connections(first)
            with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1: Address already in use"):
                take_connections(second)


def test_a_port_is_shared_only_with_those_that_ask_for_it() -> None:
    with listen("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port, shared=True) as second:
            take_connections(first)
            take_connections(second)
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1: Address already in use"):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", 0) as alone:
        take_connections(alone)
        with pytest.raises(ConfigError, match="Address already in use"):
            listen("127.0.0.1", alone.getsockname()[1], shared=True)


def test_a_port_in_use_is_told_by_its_flag() -> None:
    with listen("127.0.0.1", 0) as alone:
        take_connections(alone)
        port = alone.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--ollama-port {port} on 127.0.0.1: Address already in use"):
            listen("127.0.0.1", port, "--ollama-port")


@pytest.mark.parametrize("wrong", [{"port": 11434}, {"port": 8000, "own_port": 11434}])
def test_a_port_for_ollama_s_clients_is_another_one(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--ollama-port 11434: is this gateway's already"):
        GatewaySettings(**wrong, ollama_port=11434)
    both = GatewaySettings(port=8000, ollama_port=11434)
    assert both.public_ports == {"--port": 8000, "--ollama-port": 11434}


async def test_a_gateway_answers_at_each_of_its_ports() -> None:
    stopping = asyncio.Event()

    async def drain(grace_s: float) -> None:
        pass

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Response("here")(scope, receive, send)

    parts: Any = SimpleNamespace(
        batches=None,
        responses=None,
        requests=SimpleNamespace(drain=drain),
        control=SimpleNamespace(leaving=asyncio.Event()),
    )
    own = [listen("127.0.0.1", 0), listen("127.0.0.1", 0)]
    serving = asyncio.create_task(serve(cast(Any, app), parts, GatewaySettings(), own, [], stopping))
    async with httpx.AsyncClient(timeout=60) as client:
        for listener in own:
            port = listener.getsockname()[1]
            assert (await client.get(f"http://127.0.0.1:{port}/")).text == "here"
    stopping.set()
    await serving


def test_a_held_port_is_one_holders_and_gives_every_connection_to_a_listener() -> None:
    port = own_port()
    with held_port(port, "127.0.0.1"):
        with pytest.raises(OSError, match="in use"), held_port(port, "127.0.0.1"):
            raise AssertionError("two hold it")
        with pytest.raises(ConfigError, match="in use"), listen("127.0.0.1", port) as other:
            take_connections(other)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with listen("127.0.0.1", port, shared=True) as shared:
            take_connections(shared)
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port)), shared.accept()[0]:
                    pass


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", own_port())) == errno.ECONNREFUSED


@pytest.mark.skipif(not socket.has_ipv6 or not _has_ipv6(), reason="this host has no IPv6")
def test_a_port_of_ipv6_is_free_until_somebody_listens_there() -> None:
    port = own_port()
    with listen("::1", port) as listener:
        take_connections(listener)
        assert not port_is_free(port, "::1")
    assert port_is_free(port, "::1")


async def test_a_gateway_that_shares_its_port_may_be_stopped_before_it_serves() -> None:
    stopping, drained = asyncio.Event(), list[float]()
    stopping.set()

    async def drain(grace_s: float) -> None:
        drained.append(grace_s)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asked")

    parts: Any = SimpleNamespace(
        batches=None,
        responses=None,
        requests=SimpleNamespace(drain=drain),
        control=SimpleNamespace(leaving=asyncio.Event()),
    )
    with listen("127.0.0.1", 0, shared=True) as shared, listen("127.0.0.1", 0) as own:
        port, own_port = (listener.getsockname()[1] for listener in (shared, own))
        settings = GatewaySettings(port=port, own_port=own_port)
        await serve(cast(Any, app), parts, settings, [own], [shared], stopping)
    assert drained == [settings.drain_s]


@pytest.mark.parametrize("other", ["port", "own_port", "ollama_port"])
def test_the_port_for_rpc_is_another_one(other: str) -> None:
    with pytest.raises(ConfigError, match="--grpc-port 8001: HTTP is served there"):
        GatewaySettings(grpc_port=8001, **{other: 8001})


def test_a_port_for_rpc_is_tried_before_anything_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "find_spec", lambda name: None)
    rpc.check_rpc(GatewaySettings())  # nothing is asked for
    settings = GatewaySettings(grpc_port=own_port())
    with pytest.raises(ConfigError, match="--grpc-port: needs grpcio"):
        rpc.check_rpc(settings)
    monkeypatch.setattr(rpc, "find_spec", lambda name: object())
    rpc.check_rpc(settings)
    with listen("127.0.0.1", settings.grpc_port) as taken:
        take_connections(taken)
        with pytest.raises(ConfigError, match="Address already in use"):
            rpc.check_rpc(settings)
