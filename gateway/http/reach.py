"""Liveness of a client that ended its input: does it still read?

One that closed its side only and one that is gone send the same FIN. A closed socket answers further bytes with a reset, which
the kernel notes as the socket's error. So a client of HTTP/1.1 whose answer has not begun gets one `100 Continue`, one of
HTTP/1.0 the first bytes of its answer, and one in the middle of a stream an event that says nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from gateway.http.exchange import Exchange

LOOK_EVERY_S = 0.1
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Reach:
    """Aborts the connection when its client turns out to be gone. `due`: the exchange whose answer is pending."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, due: Callable[[], Exchange | None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._due = due
        self._probed: Exchange | None = None
        self._timer = loop.call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Stop the keep-alive timer."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        taken = self._transport.get_extra_info("socket")
        if taken is None or taken.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        exchange = self._due()
        if exchange is not None and exchange is not self._probed:
            self._probed = exchange
            if not exchange.response_started:
                if exchange.scope["http_version"] == "1.0":
                    exchange.begin_status_line()
                else:
                    self._transport.write(PROBE)
            elif exchange.idle_event and not exchange.response_complete:
                exchange.write(exchange.idle_event)
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)
