"""The gateway's socket."""

from __future__ import annotations

import socket

import pytest

from common.settings import ConfigError
from services.gateway.server import listen, take_connections


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
