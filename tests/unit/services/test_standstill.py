"""A gateway whose event loop stands still leaves the shared port, and comes back. Real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from services.gateway.server import listen, new_server
from services.gateway.settings import GatewaySettings
from services.gateway.shared import SharedPort
from services.up.standstill import is_stopped
from tests.ports import own_port

PATIENCE_S = 60.0


@pytest.fixture
def neighbour() -> Iterator[socket.socket]:
    """Another gateway at the same port, which accepts whatever it gets."""
    with listen("127.0.0.1", own_port(), shared=True) as listener:
        listener.listen(1_000)
        listener.setblocking(False)
        yield listener


def dealt(neighbour: socket.socket, count: int = 40) -> int:
    """How many of so many new connections the neighbour got."""
    clients = [socket.create_connection(neighbour.getsockname(), timeout=PATIENCE_S) for _ in range(count)]
    found = 0
    while True:
        try:
            neighbour.accept()[0].close()
        except BlockingIOError:
            break
        found += 1
    for client in clients:
        client.close()
    return found


async def test_the_kernel_deals_a_standing_gateway_nothing_until_it_moves(
    neighbour: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = neighbour.getsockname()[1]
    settings = GatewaySettings(port=port, own_port=own_port())

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        """Nobody asks."""

    server = new_server(app, settings)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    holding = asyncio.create_task(SharedPort(server, listen("127.0.0.1", port, shared=True), settings).hold())
    loop = asyncio.get_running_loop()

    def told(message: str) -> int:
        return sum(record.msg == message for record in caplog.records)

    async def until(message: str, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while told(message) < count:
                await asyncio.sleep(0.02)

    await until("gateway.listening", 1)
    assert await loop.run_in_executor(None, dealt, neighbour) < 40
    left: list[int] = []

    def stand() -> None:
        """In the event loop, until it was seen to stand."""
        step = threading.Event()
        for _ in range(int(PATIENCE_S / 0.05)):
            if told("gateway.stands_still"):
                break
            step.wait(0.05)
        step.wait(0.2)  # the thread has told it, and leaves now
        left.append(dealt(neighbour))

    stand()
    assert left == [40]
    [record] = [record for record in caplog.records if record.msg == "gateway.stands_still"]
    assert "in stand" in record.__dict__["where"]
    await until("gateway.listening", 2)
    assert await loop.run_in_executor(None, dealt, neighbour) < 40
    holding.cancel()
    await asyncio.wait([holding])
    server.leave(port)
    assert await loop.run_in_executor(None, dealt, neighbour) == 40
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == [record]


def test_a_stopped_process_is_told_from_a_running_one() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    try:
        for _ in range(int(PATIENCE_S / 0.05)):
            if is_stopped(child.pid):
                break
            threading.Event().wait(0.05)
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)
    assert not is_stopped(None)
