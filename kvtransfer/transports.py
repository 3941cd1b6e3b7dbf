"""The table of transports. To add one, write a module with a `Transport` class and add an entry here.

Loads neither torch nor a transport's library, so settings, `baton up` and the roles can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TransportName = Literal["shm", "cuda_ipc", "ucx", "local"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """Facts about a transport that are known before it is opened."""

    implementation: str  # module:class, imported when it is opened
    devices: tuple[str, ...]  # devices whose memory it moves
    reaches_others: bool = True  # False: its workers hand no KV over
    listens_at: bool = False  # takes the address at which peers on other hosts reach it
    frees_pools: tuple[str, ...] = ()  # devices whose memory a pool may give back while it is open

    def suits(self, device: str) -> bool:
        """True if it moves the memory of `cpu`, `cuda` or `cuda:N`."""
        return device.partition(":")[0] in self.devices


TRANSPORTS: dict[TransportName, TransportKind] = {
    "shm": TransportKind(implementation="kvtransfer.shm:ShmTransport", devices=("cpu",), frees_pools=("cpu",)),
    "cuda_ipc": TransportKind(implementation="kvtransfer.cuda.ipc:CudaIpcTransport", devices=("cuda",)),
    "ucx": TransportKind(
        implementation="kvtransfer.ucx.transport:UcxTransport",
        devices=("cpu", "cuda"),
        listens_at=True,
        frees_pools=("cpu",),  # messages have buffers of their own, and a pool's addresses stay
    ),
    "local": TransportKind(
        implementation="kvtransfer.local:LocalTransport",
        devices=("cpu", "cuda"),
        reaches_others=False,
        frees_pools=("cpu", "cuda"),
    ),
}


def automatic(device: str) -> TransportName:
    """Return what `--transport auto` means: the first in the table that moves the device's memory."""
    return next(name for name, kind in TRANSPORTS.items() if kind.suits(device))


def reaches_others(name: str) -> bool:
    """True if workers with this transport can hand KV over; unknown transports, which tests use, can."""
    return all(kind.reaches_others for known, kind in TRANSPORTS.items() if known == name)


def frees_pools(name: str, device: str) -> bool:
    """True if a pool on `cpu`, `cuda` or `cuda:N` may be freed, and taken again, while workers are connected."""
    return any(device.partition(":")[0] in kind.frees_pools for known, kind in TRANSPORTS.items() if known == name)
