"""The gateway process: `baton gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import sys
from pathlib import Path

import uvicorn

from common.bus import connect_bus
from common.config import LOOPBACK, ConfigError, GatewaySettings, fail, load_settings
from common.errors import ServingError
from common.peers import Peers
from common.store import connect_store
from common.telemetry import start_logging
from common.tls import check_server_files
from gateway.admission import RequestLimits
from gateway.app import HttpSettings, create_app
from gateway.attainment import ServiceLevels
from gateway.budgets import SharedBudgets
from gateway.connection import bounded_to
from gateway.console.control import FleetControl
from gateway.requests import Requests
from gateway.tenants import Tenants
from gateway.tokenizer import ChatTokenizer
from services.connections import nats_settings, redis_settings
from services.gateway.batches import make_batches
from services.gateway.descriptors import make_room
from services.leaving import ending_in_time, until_signalled
from services.settled import keep_what_is_loaded
from services.tracing import open_tracer

log = logging.getLogger("baton.gateway")

SEND_BUFFER_BYTES = 128 << 10  # of the kernel, for a connection; it takes twice that, its own records included


async def run(settings: GatewaySettings) -> None:
    """Serve HTTP until signalled; then refuse new requests, finish the running ones, leave."""
    if settings.tls_cert:
        check_server_files(settings.tls_cert, settings.tls_key)
    listener = _listen(settings.host, settings.port)
    make_room(settings.max_connections)
    tokenizer = _tokenizer(settings.model)
    tenants = _tenants(settings)
    async with (
        until_signalled() as stopping,
        ending_in_time(stopping, settings.drain_s),
        connect_bus(nats_settings(settings), name="gateway") as bus,
        connect_store(redis_settings(settings)) as store,
    ):
        peers = Peers()
        await peers.start(bus)
        gateway_id = settings.gateway_id or f"gateway-{secrets.token_hex(4)}"
        tracer = open_tracer(
            settings.otlp_endpoint, service="gateway", instance=gateway_id, rest_share=settings.trace_rest_share
        )
        levels = ServiceLevels(
            ttft_s=settings.ttft_slo_ms / 1000, tpot_s=settings.tpot_slo_ms / 1000, window_s=settings.slo_window_s
        )
        requests = Requests(
            bus=bus,
            store=store,
            peers=peers,
            gateway_id=gateway_id,
            incarnation=secrets.randbits(63),
            limits=RequestLimits(
                max_requests=settings.max_requests,
                max_queued_tokens=settings.max_queued_tokens,
                cut_over_tokens=settings.local_prefill_tokens,
                window_s=settings.window_s,
                reserved=settings.reserved,
            ),
            levels=levels,
            tracer=tracer,
        )
        await requests.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, tenants)
        control = FleetControl(bus, peers, gateway_id=gateway_id)
        await control.start()
        batches = make_batches(settings, tenants, tracer) if settings.batch_store_mb else None
        app = create_app(
            generations=requests,
            budgets=SharedBudgets(store),
            tokenizer=tokenizer,
            settings=HttpSettings(
                served_model=settings.served_name,
                tenants=tenants,
                max_body_bytes=settings.max_body_mb << 20,
                request_timeout_s=settings.request_timeout_s,
                trace_share=settings.trace_share,
                levels=levels,
                gateway_id=gateway_id,
                console=settings.console,
            ),
            tracer=tracer,
            control=control,
            batches=batches.connect if batches is not None else None,
        )
        server = _Server(
            uvicorn.Config(
                app,
                http=bounded_to(settings.max_connections),
                log_level="warning",
                access_log=False,
                timeout_keep_alive=75,
                ssl_certfile=settings.tls_cert or None,
                ssl_keyfile=settings.tls_key or None,
            )
        )
        if batches is not None:
            await batches.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        scheme = "https" if settings.tls_cert else "http"
        keep_what_is_loaded()
        log.info("gateway.listening", extra={"url": f"{scheme}://{settings.host}:{listener.getsockname()[1]}"})
        await stopping.wait()
        if batches is not None:
            await batches.stop()
        await requests.drain(settings.drain_s)
        control.leaving.set()  # or the server would wait for those who watch
        server.should_exit = True
        await serving
        await requests.close()
        await control.close()
        await peers.close()
        await asyncio.to_thread(tracer.close)


def _tenants(settings: GatewaySettings) -> Tenants:
    path = Path(settings.tenants) if settings.tenants else None
    tenants = Tenants(api_keys=settings.keys, admin_key=settings.admin_key, path=path)
    if settings.host not in LOOPBACK and tenants.open_to_all:
        raise ConfigError(f"--tenants {path}: has no key, and --host {settings.host} is not loopback: `baton keys new`")
    return tenants


def _reload(tenants: Tenants) -> None:
    """Nobody is dropped: who is being served goes on. A file that is wrong changes nothing."""
    try:
        tenants.reload()
        log.info("tenants.reloaded", extra={"tenants": len(tenants.names), "keys": len(tenants.keys)})
    except ConfigError as error:
        log.error("tenants.not_reloaded", extra={"error": str(error)})


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: ours drain first."""

    def capture_signals(self):  # type: ignore[no-untyped-def]
        return contextlib.nullcontext()


def _tokenizer(folder: Path) -> ChatTokenizer:
    try:
        return ChatTokenizer(folder)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ConfigError(f"--model {folder}: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    """Bind now, so that a port in use is one clear line before anything else starts."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. asyncio sets it only where the socket names its protocol; without it the first token of a reused
    # connection waits up to 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Left to itself the kernel takes megabytes for each client that doesn't read; then it would hardly ever be noticed.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"--port {port} on {host}: {error.strerror}: choose another port or stop what uses it"
        ) from None
    return listener


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(GatewaySettings, command="gateway", arguments=sys.argv[1:])
        start_logging(service="gateway", level=settings.log_level, form=settings.log_format)
        asyncio.run(run(settings))
    except (ConfigError, ServingError, OSError, ValueError) as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
