"""The transport by name. A setting chooses it; nothing falls back to another one silently."""

from __future__ import annotations

from kvtransfer.transport import Transport

TRANSPORTS = ("shm", "cuda_ipc", "ucx", "local")


def open_transport(name: str, *, host: str = "127.0.0.1") -> Transport:
    """Return transport `name`. Raises ValueError listing the names, ModuleNotFoundError without its library."""
    if name == "shm":
        from kvtransfer.shm import ShmTransport

        return ShmTransport()
    if name == "cuda_ipc":
        from kvtransfer.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport()
    if name == "local":
        from kvtransfer.local import LocalTransport

        return LocalTransport()
    if name == "ucx":
        from kvtransfer.ucx import UcxTransport  # loads UCX: only where it was asked for

        return UcxTransport(host=host)
    raise ValueError(f"unknown transport {name!r}: choose one of {', '.join(TRANSPORTS)}")
