"""The gateway's socket, and the HTTP server on it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from starlette.types import ASGIApp

from common.settings import ConfigError
from services.gateway.protocol import can_join, http_options
from services.gateway.settings import GatewaySettings

SEND_BUFFER_BYTES = 128 << 10  # per connection; the kernel doubles it
KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: ours drain first.

    Where it `can_join` no port later, all are given to `serve`, and `leave` leaves none.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.can_join = can_join()
        self.servers = []  # a gateway may have to leave before it serves

    def capture_signals(self):  # type: ignore[no-untyped-def]
        return contextlib.nullcontext()

    async def join(self, listener: socket.socket) -> None:
        """Accept connections at another port, too, once `serve` does."""
        take_connections(listener)
        loop, config = asyncio.get_running_loop(), self.config
        joined = await loop.create_server(self._connection, sock=listener, ssl=config.ssl, backlog=config.backlog)
        self.servers.append(joined)

    def _connection(self) -> asyncio.Protocol:
        config, state = self.config, self.lifespan.state
        made: asyncio.Protocol = config.http_protocol_class(config, self.server_state, state)  # type: ignore[call-arg]
        return made

    def leave(self, port: int) -> None:
        """Stop accepting at `port`; other listeners get its connections."""
        for server in self.servers:
            if any(taken.getsockname()[1] == port for taken in server.sockets):
                server.close()


def new_server(app: ASGIApp, settings: GatewaySettings) -> Server:
    return Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # client addresses are never used
            ws="none",  # WebSockets would bypass the limits and the keys
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=settings.tls_cert or None,
            ssl_keyfile=settings.tls_key or None,
            **http_options(settings.max_connections),
        )
    )


def listen(host: str, port: int, flag: str = "--port", *, shared: bool = False) -> socket.socket:
    """Bind before anything else starts, so that a port in use gives one clear error with its `flag`. Raises ConfigError.

    The kernel deals the connections at a `shared` port out to all that share it, and to no dead one.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Accepted sockets inherit it; asyncio sets it only for named protocols. Without it the first token on a reused connection
    # waits up to 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(listener)
    # The kernel's default of megabytes would hide slow readers.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise _in_use(host, port, error, flag) from None
    return listener


def take_connections(listener: socket.socket) -> None:
    """Listen. Raises ConfigError: two processes that start together may both bind, but only one may listen."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen()
    except OSError as error:
        raise _in_use(host, port, error) from None


def _in_use(host: str, port: int, error: OSError, flag: str = "--port") -> ConfigError:
    return ConfigError(f"{flag} {port} on {host}: {error.strerror}: choose another port or stop what uses it")


def _keep_alive(listener: socket.socket) -> None:
    """Enable TCP keep-alive probes: the connection of a client whose host died ends after a minute."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
