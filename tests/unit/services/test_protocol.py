"""A uvicorn that lacks what the gateway's protocol overrides serves by its own, and the log says what is lost."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
import uvicorn

from gateway.http.connection import BoundedProtocol
from services.gateway import protocol
from services.gateway.server import listen, new_server
from services.gateway.settings import GatewaySettings


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})


async def served(*, can_join: bool = True) -> tuple[str, bool]:
    """An answer over HTTP, and whether the gateway's own protocol gave it."""
    server = new_server(app, GatewaySettings())
    assert server.can_join == can_join
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with asyncio.timeout(60):
            while not server.started:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(timeout=60) as client:
            text = (await client.get(f"http://127.0.0.1:{port}/")).text
        server.should_exit = True
        await serving
    return text, issubclass(server.config.http_protocol_class, BoundedProtocol)


async def test_the_installed_uvicorn_has_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    assert protocol.lacking() == []
    assert await served() == ("served", True)
    assert caplog.records == []


@pytest.mark.parametrize("table", ["OF_A_CONNECTION", "OF_AN_EXCHANGE"])
async def test_without_one_of_them_uvicorn_serves_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    monkeypatch.setattr(protocol, table, ("renamed_since",))
    assert await served() == ("served", False)
    [record] = [record for record in caplog.records if record.msg == "gateway.library_differs"]
    assert record.levelno == logging.WARNING
    told = record.__dict__
    assert told["library"] == "uvicorn"
    assert "renamed_since" in told["lacks"][0]
    assert "bounds on heads" in told["lost"]


@pytest.mark.parametrize("name", protocol.OF_A_SERVER)
async def test_a_server_that_lacks_one_of_them_takes_all_ports_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """As if a release had renamed it: the functions that name it are away."""
    for each, made in list(vars(uvicorn.Server).items()):
        if name in getattr(getattr(made, "__code__", None), "co_names", ()):
            monkeypatch.setattr(uvicorn.Server, each, staticmethod(made))
    assert not protocol.can_join()
    monkeypatch.undo()
    monkeypatch.setattr(protocol, "OF_A_SERVER", ("renamed_since",))
    assert await served(can_join=False) == ("served", True)
    told = [record.__dict__ for record in caplog.records if record.msg == "gateway.library_differs"]
    assert [one["lacks"] for one in told] == [[f"Server.{name}"], ["Server.renamed_since"]]
    assert "drain" in told[0]["lost"]


async def test_a_module_that_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("uvicorn.protocols.http.httptools_impl.STATUS_LINE")
    assert "STATUS_LINE" in protocol.lacking()[0]
