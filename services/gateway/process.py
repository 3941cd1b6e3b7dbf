"""The gateway process, from its settings to its exit."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import sys
import time

from fastapi import FastAPI

from common.bus import connect_bus
from common.errors import ServingError
from common.settings import ConfigError
from common.store import connect_store
from common.wire import connect
from gateway.placement.ledger import function_libraries
from modelfiles.files import forget_files
from services.gateway.descriptors import make_room
from services.gateway.files import read_own, read_tenants, read_text_tokenizers, read_tokenizers, reload
from services.gateway.parts import Parts, app_of, started
from services.gateway.rpc import check_rpc, rpc_served
from services.gateway.server import Server, listen, new_server, take_connections
from services.gateway.settings import GatewaySettings
from services.gateway.shared import SharedPort, tell_listening
from services.runtime.loading import fail, load_settings
from services.runtime.log import start_logging
from services.runtime.memory import keep_what_is_loaded
from services.runtime.models.named import all_brought
from services.runtime.models.serving import serve as serve_files
from services.runtime.signals import ending_in_time, until_signalled

log = logging.getLogger("baton.gateway")

ALONE_S = 10.0  # then it joins anyway and tells clients why it can't serve
JOIN_EVERY_S = 0.05


async def run(settings: GatewaySettings) -> None:
    """Serve HTTP until signalled; then refuse new requests, finish the running ones, exit."""
    if settings.tls_cert:
        check_server_files(settings.tls_cert, settings.tls_key)
    shares = bool(settings.own_port)
    public = [listen(settings.host, port, flag, shared=shares) for flag, port in settings.public_ports.items()]
    own = [listen(settings.host, settings.own_port, "--own-port")] if shares else public
    check_rpc(settings)
    make_room(settings.max_connections)
    tokenizers, tenants = read_tokenizers(settings), read_tenants(settings)
    models, texts = read_own(settings, tokenizers), read_text_tokenizers(settings)
    async with (
        until_signalled() as stopping,
        ending_in_time(stopping, settings.drain_s),
        connect_bus(settings.nats(), name="gateway") as bus,
        connect(settings.nats(), name="gateway-disk") as disk,
        connect_store(settings.redis(), libraries=function_libraries()) as store,
        started(
            settings,
            bus=bus,
            disk=disk,
            store=store,
            tenants=tenants,
            tokenizers=tokenizers,
            models=models,
            texts=texts,
        ) as parts,
    ):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload, tenants)
        app = app_of(parts, settings)
        async with rpc_served(app, settings):
            await serve(app, parts, settings, own, public if shares else [], stopping)


async def serve(
    app: FastAPI,
    parts: Parts,
    settings: GatewaySettings,
    own: list[socket.socket],
    shared: list[socket.socket],
    stopping: asyncio.Event,
) -> None:
    """Serve on the gateway's own listeners, and on the shared ones once requests can be answered."""
    server = new_server(app, settings)
    if not server.can_join:
        own, shared = [*own, *shared], []
    for listener in own:
        take_connections(listener)
    if parts.batches is not None:
        await parts.batches.start()
    if parts.responses is not None:
        await parts.responses.start()
    serving = asyncio.create_task(server.serve(sockets=own))
    joining = asyncio.create_task(_join(server, shared, parts, settings))
    forget_files()
    keep_what_is_loaded()
    for listener in own:
        tell_listening(listener, settings)
    try:
        await stopping.wait()
    except asyncio.CancelledError:  # the name was lost
        joining.cancel()
        stopping.set()  # a hanging task is cut off in time as well
        await parts.requests.drain(0, why="this gateway ends: another one has its name; send the request again")
        await _leave(parts, server, serving)
        raise
    joining.cancel()
    for port in settings.public_ports.values() if shared else ():
        server.leave(port)  # new clients go elsewhere without a retry
    if parts.batches is not None:
        await parts.batches.stop()
    if parts.responses is not None:
        parts.responses.leave()
    await parts.requests.drain(settings.drain_s)
    await _leave(parts, server, serving)
    if parts.responses is not None:
        await parts.responses.stop()  # the last answers are stored


async def _join(server: Server, shared: list[socket.socket], parts: Parts, settings: GatewaySettings) -> None:
    """Share a port once requests can be answered, until cancelled; before that, the other gateways serve clients better."""
    alone_until = time.monotonic() + ALONE_S
    while not server.started or (parts.requests.not_ready_reason and time.monotonic() < alone_until):
        await asyncio.sleep(JOIN_EVERY_S)
    await asyncio.gather(*(SharedPort(server, listener, settings).hold() for listener in shared))


async def _leave(parts: Parts, server: Server, serving: asyncio.Task[None]) -> None:
    """Let written data reach the clients."""
    if parts.responses is not None:
        parts.responses.hang_up()
    parts.control.leaving.set()  # otherwise the server would wait for open consoles
    server.should_exit = True
    await serving


def main(kind: type[GatewaySettings] = GatewaySettings) -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(kind, command="gateway", arguments=sys.argv[1:])
        start_logging(service="gateway", level=settings.log_level, form=settings.log_format)
        settings = all_brought(settings, log.info, text_alone=True)
        for folder in settings.folders.values():
            serve_files(folder, settings.gateway_id or "gateway")  # also of a model that is not loaded now
        asyncio.run(run(settings))
    except (ConfigError, ServingError, OSError, ValueError) as error:
        return fail(error)
    return 0


def check_server_files(cert: str, key: str) -> None:
    """Raise ConfigError, naming the files, unless a server can use them."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {cert}, --tls-key {key or cert}: {error.strerror or error}") from None
