"""A worker's further node: it joins the first one, starts this host's stages, and ends with them.

It knows neither NATS nor Redis. Its processes are told by the first node's leader, over connections that they get from here.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from common.settings import ConfigError
from engine.parallel import layout
from engine.parallel.child import Child
from engine.parallel.nodes.bridged import EVERYBODY, Bridged
from engine.parallel.nodes.joining import DiffersError, Joined, join
from engine.parallel.nodes.wire import RefusedError
from services.runtime.commands import service_environment
from services.worker.nodes import Nodes
from services.worker.ranks import BRIDGE, COMMAND, asked_of, check_ranks, facts_of, secret_of
from services.worker.settings import WorkerServiceSettings
from worker.probe_file import shown
from worker.worker import EXIT_DEVICE_BROKEN

log = logging.getLogger("baton.nodes")

LOOK_S = 0.05
TOLD_S = 5.0


def serve_node(settings: WorkerServiceSettings, nodes: Nodes) -> int:
    """Serve as another node than the first; return the exit code. Raises ConfigError, ValueError, OSError.

    A first SIGTERM ends it while it waits to join. Later the leader drains with its stages, and a second one ends it at once.
    """
    check_ranks(settings)
    leaving = _signalled()
    places = nodes.places(settings.processes)
    try:
        joined = join(
            nodes.host, nodes.port, secret_of(settings), nodes.number, places, facts_of(settings), leaving.is_set
        )
    except DiffersError as error:
        raise ConfigError(f"--nnodes {settings.nnodes}: node 0 at {nodes.address} refuses this one: {error}") from None
    except RefusedError as error:
        raise ConfigError(
            f"--nnodes {settings.nnodes}: node 0 at {nodes.address}: {error}: give the same --nats-credentials on all nodes"
        ) from None
    if joined is None:
        return 0
    log.info("node.joined", extra={"node": nodes.number, "address": nodes.address})
    return _serve(settings, nodes, joined)


def _signalled() -> threading.Event:
    """An event that the first signal sets; a second one ends the process."""
    leaving = threading.Event()

    def leave(number: int, frame: object) -> None:
        if leaving.is_set():
            os._exit(128 + number)
        leaving.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    return leaving


def _serve(settings: WorkerServiceSettings, nodes: Nodes, joined: Joined) -> int:
    places = nodes.places(settings.processes)
    own = places.on(nodes.number)
    asked = asked_of(settings, settings.worker_id or f"node {nodes.number}", first=own.start)
    command, environment = [*COMMAND, msgspec.json.encode(asked).decode()], service_environment()
    size, width = settings.processes, settings.tensor_parallel_size
    shared = os.memfd_create("ranks")
    children = dict[int, Child]()
    ends = [*joined.links.values(), *joined.channels.values()]
    try:
        os.ftruncate(shared, layout.num_bytes(size))
        bridged = Bridged(BRIDGE, shared, places, [joined], node=nodes.number, width=width, environment=environment)
        try:
            for rank in own:
                passed = joined.links[rank], joined.channels[rank]
                children[rank] = Child(rank, [*command, str(rank), str(size)], passed, shared, environment)
            log.info("ranks.started", extra={"ranks": len(own), "pids": [each.pid for each in children.values()]})
            with shown(settings.ready_file):  # a group of pods is ready when all of them are
                return _until_the_end(bridged, children, nodes.number)
        finally:
            _end(ends, [*children.values()])
            bridged.close()
    finally:
        os.close(shared)
        for end in ends:
            end.close()


def _until_the_end(bridged: Bridged, children: dict[int, Child], node: int) -> int:
    """Wait until the leader ended all (0), it or this host's bridge is lost, or a process here ended (70)."""
    never = threading.Event()
    while (about_all := bridged.said_of(EVERYBODY)) is None:
        for rank, child in children.items():
            words, _ = child.ended()
            if words and not (child.left_well and _is_told(bridged)):
                said = words.replace(f"(pid {child.pid})", f"(pid {child.pid} on node {node})")
                log.critical("ranks.lost", extra={"reason": said})
                bridged.say(rank, said)
                return EXIT_DEVICE_BROKEN
        never.wait(LOOK_S)
    if about_all:
        log.critical("node.lost", extra={"reason": about_all})
        return EXIT_DEVICE_BROKEN
    return 0


def _is_told(bridged: Bridged) -> bool:
    """Wait for the bridge to say that the leader ended, as a process that left well knows already; False if it doesn't."""
    until = time.monotonic() + TOLD_S
    while bridged.said_of(EVERYBODY) is None:
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    return True


def _end(ends: Sequence[socket.socket], children: Sequence[Child]) -> None:
    """Close links and channels, which ends the processes; kill those that hang."""
    for end in ends:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed already
    for child in children:
        child.end()
