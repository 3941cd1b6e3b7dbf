"""The hosts (nodes) of a worker whose stages have no room on one: where they meet, and what must be the same on all."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.settings import ConfigError

if TYPE_CHECKING:
    from engine.parallel.nodes.joining import Joined, Meeting, Places
    from services.worker.settings import WorkerServiceSettings

log = logging.getLogger("baton.nodes")

PORT = 29501
NAMED_S, AGAIN_S = 60.0, 2.0
_WRITTEN = re.compile(r"(?P<count>\d+):(?P<number>\d+)@(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:@/]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The number of nodes, this one's among them, and the address of node 0."""

    count: int
    number: int
    host: str
    port: int = PORT

    @classmethod
    def parse(cls, text: str) -> Nodes | None:
        """Read `--nnodes`; None without any. Raises ValueError."""
        if not text:
            return None
        if (found := _WRITTEN.fullmatch(text)) is None:
            raise ValueError("written as N:RANK@HOST or N:RANK@HOST:PORT, such as 2:0@10.0.0.1")
        count, number, port = int(found["count"]), int(found["number"]), int(found["port"] or PORT)
        if not 1 < count <= 64:
            raise ValueError("2 to 64 nodes, or none of it for one")
        if number >= count:
            raise ValueError(f"nodes are numbered from 0 to {count - 1}")
        if not 0 < port < 1 << 16:
            raise ValueError("a port from 1 to 65535 is needed")
        return cls(count, number, found["host"].strip("[]"), port)

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def places(self, processes: int) -> Places:
        """Return where so many processes are."""
        from engine.parallel.nodes.joining import Places  # `--help` does without

        return Places(self.count, processes)


def is_loopback(host: str) -> bool:
    """True for an address that other hosts can't reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_nodes(settings: WorkerServiceSettings, nodes: Nodes) -> None:
    """Raise ConfigError for what stages on several hosts don't have, whatever the model."""
    stages, asked = settings.pipeline_parallel_size, f"--nnodes {settings.nnodes}"
    if stages % nodes.count:
        raise ConfigError(
            f"{asked}: --pipeline-parallel-size {stages}: each node has as many stages: take a multiple of {nodes.count}"
        )
    if not settings.nats_credentials:
        raise ConfigError(
            f"{asked}: who joins shows that it has the worker's secret: give the same --nats-credentials FILE on all nodes"
        )
    if settings.kv_transport not in ("ucx", "local"):
        raise ConfigError(
            f"{asked}: --transport {settings.kv_transport} reaches the workers of one host alone: take ucx:HOST, on each node its"
            " own address"
        )
    if settings.kv_transport == "ucx" and is_loopback(settings.transport_host) and not is_loopback(nodes.host):
        raise ConfigError(
            f"{asked}: --transport {settings.transport}: workers on other hosts can't reach {settings.transport_host}: take"
            " ucx:HOST with this node's own address"
        )
    if settings.kv_disk:
        raise ConfigError(f"{asked}: a tier in files is of one host's ranks: give no --kv-disk")


def met(
    nodes: Nodes, places: Places, key: bytes, facts: dict[str, str], is_over: Callable[[], bool]
) -> Sequence[Joined]:
    """Let the other nodes join; none once `is_over()`. Raises ConfigError, OSError."""
    from engine.parallel.nodes.joining import Meeting

    try:
        meeting = _listening(nodes, lambda: Meeting(nodes.host, nodes.port, key, places, facts), is_over)
    except OSError as error:
        raise ConfigError(
            f"--nnodes: node 0 can't listen at {nodes.address}: {error.strerror or error}: give an address of this machine"
        ) from None
    return meeting.wait(is_over)


def _listening(nodes: Nodes, listen: Callable[[], Meeting], is_over: Callable[[], bool]) -> Meeting:
    """Listen as soon as the name of this machine is known: a cluster's names come some seconds after its pods. Raises OSError."""
    until = time.monotonic() + NAMED_S
    while True:
        try:
            return listen()
        except socket.gaierror as error:
            if is_over() or time.monotonic() > until:
                raise
            log.info("node.no_name", extra={"host": nodes.host, "reason": error.strerror})
            time.sleep(AGAIN_S)
