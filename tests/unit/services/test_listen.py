"""The gateway's socket."""

from __future__ import annotations

import socket

from services.gateway.server import listen


def test_nothing_that_the_gateway_sends_waits_for_an_acknowledgement() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.proto == socket.IPPROTO_TCP
