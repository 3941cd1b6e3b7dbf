"""Opening a transport by the name in a setting; there is no silent fallback."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvtransfer.transport import Transport
from kvtransfer.transports import TRANSPORTS


def open_transport(name: str, *, host: str = "127.0.0.1") -> Transport:
    """Return transport `name`. Raises ValueError listing the names, ModuleNotFoundError without its library."""
    kind = {str(known): kind for known, kind in TRANSPORTS.items()}.get(name)
    if kind is None:
        raise ValueError(f"unknown transport {name!r}: choose one of {', '.join(TRANSPORTS)}")
    module, _, implementation = kind.implementation.partition(":")
    new: Callable[..., Transport] = getattr(import_module(module), implementation)
    return new(host=host) if kind.listens_at else new()
