"""A gateway's listener on a shared port: opened once it serves, closed while its event loop is stuck."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from common.settings import ConfigError
from services.gateway.server import Server, listen
from services.gateway.settings import GatewaySettings
from services.gateway.standstill import Standstill

log = logging.getLogger("baton.gateway")


class SharedPort:
    """A port that gateways share, as `server` listens on it. `listener` is bound but not listening yet."""

    def __init__(self, server: Server, listener: socket.socket, settings: GatewaySettings) -> None:
        self._server = server
        self._listener = listener
        self._port = listener.getsockname()[1]
        self._settings = settings
        self._moves_again = asyncio.Event()

    async def hold(self) -> None:
        """Accept connections until cancelled. The caller closes the listener then: see `Server.leave`."""
        try:
            await self._take()
            with Standstill(self._leave, self._back):
                while True:
                    await self._moves_again.wait()
                    self._moves_again.clear()
                    self._listener = listen(self._settings.host, self._port, shared=True)
                    await self._take()
        except (ConfigError, OSError):
            log.exception("gateway.cannot_share")

    async def _take(self) -> None:
        await self._server.join(self._listener)
        tell_listening(self._listener, self._settings)

    def _leave(self) -> None:
        """Stop listening, from another thread: the kernel sends it no more connections. The event loop closes it later."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RD)

    def _back(self) -> None:
        self._server.leave(self._port)
        self._moves_again.set()


def tell_listening(listener: socket.socket, settings: GatewaySettings) -> None:
    scheme = "https" if settings.tls_cert else "http"
    log.info("gateway.listening", extra={"url": f"{scheme}://{settings.host}:{listener.getsockname()[1]}"})
