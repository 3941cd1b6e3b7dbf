"""The gateway's optional gRPC port: it needs extra packages."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from fastapi import FastAPI

from common.settings import ConfigError
from services.gateway.server import listen
from services.gateway.settings import GatewaySettings

log = logging.getLogger("baton.gateway")

NEEDED = ("grpc", "google", "google.protobuf")


def check_rpc(settings: GatewaySettings) -> None:
    """Check the gRPC port. Raises ConfigError if the port is in use, or a package is missing."""
    if not settings.grpc_port:
        return
    if not all(map(find_spec, NEEDED)):
        raise ConfigError("--grpc-port: needs grpcio and protobuf: `pip install grpcio protobuf`, or leave it out")
    listen(settings.host, settings.grpc_port, "--grpc-port", shared=bool(settings.own_port)).close()


@asynccontextmanager
async def rpc_served(app: FastAPI, settings: GatewaySettings) -> AsyncIterator[None]:
    """Context manager: serve gRPC through the application's door. Raises OSError."""
    if not settings.grpc_port:
        yield
        return
    from gateway.rpc.server import RpcSettings, serving

    bounds = RpcSettings(
        host=settings.host,
        port=settings.grpc_port,
        max_body_bytes=settings.max_body_mb << 20,
        max_calls=settings.max_connections,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        shares_port=bool(settings.own_port),
        ignores_unknown_fields=settings.unknown_fields == "ignore",
    )
    async with serving(app.state.door, bounds, app.state.pooled_tensors) as port:
        log.info("gateway.serves_rpc", extra={"address": f"{settings.host}:{port}", "tls": bool(settings.tls_cert)})
        yield
