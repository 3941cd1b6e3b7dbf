"""The gRPC server: its limits and its port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from gateway.http.body import BodyLimits
from gateway.pooling.tensors import PooledTensors
from gateway.routes.door import Door
from gateway.rpc.service import InferenceService

MAX_METADATA_BYTES = 64 << 10
MAX_STREAMS = 128  # concurrent calls of one connection
MS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcSettings:
    """Settings of the gRPC side."""

    host: str
    port: int  # 0: any free one
    max_body_bytes: int
    max_calls: int  # concurrent; further ones are refused
    tls_cert: str = ""  # path of a certificate chain (PEM); empty: no TLS
    tls_key: str = ""  # path of its key; empty: in the same file
    shares_port: bool = False
    ignores_unknown_fields: bool = False
    end_s: float = 5.0  # grace for calls that still run at the end


@asynccontextmanager
async def serving(door: Door, settings: RpcSettings, pooled: PooledTensors | None = None) -> AsyncIterator[int]:
    """Context manager: serve gRPC; yields the port. Raises OSError if it is in use."""
    limits = BodyLimits(max_bytes=settings.max_body_bytes)
    service = InferenceService(door, limits, ignores_unknown=settings.ignores_unknown_fields, pooled=pooled)
    server = grpc.aio.server(options=_options(settings), maximum_concurrent_rpcs=settings.max_calls)
    server.add_generic_rpc_handlers((service.handler(),))
    port = _listen(server, settings)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(settings.end_s)


def _options(settings: RpcSettings) -> list[tuple[str, int]]:
    """Limits of messages and connections. A dead client is noticed after 80 s."""
    return [
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),  # answers have their own limits
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.keepalive_time_ms", 60 * MS),
        ("grpc.keepalive_timeout_ms", 20 * MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 10 * MS),
        ("grpc.so_reuseport", int(settings.shares_port)),
    ]


def _listen(server: grpc.aio.Server, settings: RpcSettings) -> int:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.port}"
    try:
        if not settings.tls_cert:
            return int(server.add_insecure_port(address))
        cert, key = (Path(path).read_bytes() for path in (settings.tls_cert, settings.tls_key or settings.tls_cert))
        return int(server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)])))
    except RuntimeError as error:
        raise OSError(f"--grpc-port {settings.port} on {settings.host}: {error}: choose another port") from None
