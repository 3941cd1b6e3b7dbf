"""The meeting of a worker's nodes: connections to the first one's port, until each other one has brought its own.

A node brings one for its bridge and, for each of its processes, a link and a channel, which are used from then on as if
the leader had started that process. Before any of them does anything, its facts are compared with the leader's.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from engine.parallel.nodes.wire import (
    GREETING_S,
    RefusedError,
    greet,
    introduce,
    receive_message,
    send_message,
    tuned,
)

log = logging.getLogger("baton.nodes")

LOOK_S = 0.1
CONNECT_S = 5.0
AGAIN_S = 0.5  # between two attempts to reach node 0
MOST_GREETED = 16  # connections at a time that have not said who they are
BRIDGE, LINK, CHANNEL = "bridge", "link", "channel"
GO = b"go"


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message of a connection."""

    node: int
    session: str  # made up at each start of a node
    kind: str
    rank: int = 0  # whose link or channel it is
    facts: dict[str, str] = {}  # a bridge's: what must be the same on all nodes


class DiffersError(ValueError):
    """Node 0 and another one can't make one worker."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a worker's processes: as many on each node, neighbours together."""

    nodes: int
    size: int

    def on(self, node: int) -> range:
        """The processes of a node, by number."""
        each = self.size // self.nodes
        return range(node * each, (node + 1) * each)


@dataclass(frozen=True, slots=True)
class Joined:
    """Another node's connections, and where they come from."""

    node: int
    address: str
    session: str
    bridge: socket.socket
    links: dict[int, socket.socket] = field(default_factory=dict)
    channels: dict[int, socket.socket] = field(default_factory=dict)
    let_in: set[tuple[str, int]] = field(default_factory=set)  # kinds and processes: kept once they are answered

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.address})"

    @property
    def is_gone(self) -> bool:
        """True if it closed its bridge's connection, on which it says nothing yet."""
        return bool(select.select([self.bridge], [], [], 0)[0])

    def close(self) -> None:
        for end in (self.bridge, *self.links.values(), *self.channels.values()):
            end.close()


class Meeting:
    """Node 0's port. It closes once all have joined: no other connection is taken."""

    def __init__(self, host: str, port: int, key: bytes, places: Places, facts: Mapping[str, str]) -> None:
        """Listen. Raises OSError."""
        self._key, self._places, self._facts = key, places, facts
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._port = socket.create_server((host, port), family=family, backlog=MOST_GREETED)
        self._port.settimeout(LOOK_S)
        self._joined: dict[int, Joined] = {}
        self._changing = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_GREETED)

    @property
    def port(self) -> int:
        found: int = self._port.getsockname()[1]
        return found

    def wait(self, is_over: Callable[[], bool]) -> list[Joined]:
        """Wait until all other nodes have joined; return them in order, or none once `is_over()`. Raises OSError."""
        with contextlib.closing(self._port):
            while not is_over():
                with contextlib.suppress(TimeoutError):
                    end, address = self._port.accept()
                    end.settimeout(None)
                    self._greet(end, address[0])
                if self._are_all_here() and (all_of_them := self._all_go()):
                    return all_of_them
        for each in self._joined.values():
            each.close()
        return []

    def _greet(self, end: socket.socket, address: str) -> None:
        if not self._room.acquire(blocking=False):
            end.close()
            return
        threading.Thread(target=self._let_in, args=(end, address), name="greets", daemon=True).start()

    def _let_in(self, end: socket.socket, address: str) -> None:
        try:
            greet(tuned(end), self._key)
            end.settimeout(GREETING_S)
            hello = msgspec.json.decode(receive_message(end), type=Hello)
            reason = self._checked(hello, end, address)
            send_message(end, reason.encode())
            if reason:
                raise RefusedError(reason)
            end.settimeout(None)
            self._keep(hello, end)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("node.refused", extra={"address": address, "reason": str(error)})
            end.close()
        finally:
            self._room.release()

    def _checked(self, hello: Hello, end: socket.socket, address: str) -> str:
        """Keep a bridge's connection, which its links refer to; return the reason if one is refused."""
        with self._changing:
            here = self._joined.get(hello.node)
            if hello.kind == BRIDGE:
                if reason := self._differs(hello):
                    return reason
                if here is not None and not here.is_gone:
                    return (
                        f"--nnodes: node {hello.node} has joined already, from {here.address}: give each its own number"
                    )
                self._joined[hello.node] = Joined(hello.node, address, hello.session, end)
                log.info("node.joined", extra={"node": hello.node, "address": address})
                return ""
            place = (hello.kind, hello.rank)
            if (
                here is None
                or here.session != hello.session
                or hello.kind not in (LINK, CHANNEL)
                or place in here.let_in
            ):
                return "it has not joined, or joins again"
            if hello.rank not in self._places.on(hello.node):
                return f"process {hello.rank} is not one of node {hello.node}'s"
            here.let_in.add(place)
            return ""

    def _keep(self, hello: Hello, end: socket.socket) -> None:
        """Keep a link or a channel, once nothing more of joining is said on it: from then on all may be here."""
        with self._changing:
            here = self._joined.get(hello.node)
            if here is not None and here.session == hello.session and hello.kind != BRIDGE:
                {LINK: here.links, CHANNEL: here.channels}[hello.kind][hello.rank] = end

    def _differs(self, hello: Hello) -> str:
        theirs = hello.facts
        if hello.facts.keys() == self._facts.keys():
            lines = [
                f"{name}: {ours} on node 0, {theirs[name]} here"
                for name, ours in self._facts.items()
                if theirs[name] != ours
            ]
        else:
            lines = ["other facts are compared: run the same release everywhere"]
        if not lines and not 0 < hello.node < self._places.nodes:
            lines = [f"--nnodes: there is no node {hello.node} of {self._places.nodes}"]
        return "; ".join(lines)

    def _are_all_here(self) -> bool:
        with self._changing:
            for node in [node for node, each in self._joined.items() if each.is_gone]:
                log.warning("node.left", extra={"node": node, "address": self._joined[node].address})
                self._joined.pop(node).close()
            return all(self._is_whole(node) for node in range(1, self._places.nodes))

    def _is_whole(self, node: int) -> bool:
        here, ranks = self._joined.get(node), {*self._places.on(node)}
        return here is not None and here.links.keys() == here.channels.keys() == ranks

    def _all_go(self) -> list[Joined]:
        found = [self._joined[node] for node in range(1, self._places.nodes)]
        for each in found:
            try:
                send_message(each.bridge, GO)
            except OSError:  # it left: the others end, and join again
                return self._none_goes(found)
        return found

    def _none_goes(self, found: list[Joined]) -> list[Joined]:
        for each in found:
            each.close()
        self._joined.clear()
        return []


def join(
    host: str, port: int, key: bytes, node: int, places: Places, facts: Mapping[str, str], is_over: Callable[[], bool]
) -> Joined | None:
    """Join as another node; return the connections to node 0 once all have joined, None once `is_over()`.

    Raises DiffersError, RefusedError, OSError.

    Node 0 may start later: what does not answer is tried again.
    """
    session, has_waited = secrets.token_hex(8), False
    while not is_over():
        try:
            bridge = _connected(host, port, key)
        except RefusedError:
            raise
        except OSError as error:
            if not has_waited:
                log.info("node.waits", extra={"address": f"{host}:{port}", "reason": error.strerror or str(error)})
            has_waited = True
            time.sleep(AGAIN_S)
            continue
        joined = Joined(0, host, session, bridge)
        try:
            _say(bridge, Hello(node=node, session=session, kind=BRIDGE, facts=dict(facts)))
            for rank in places.on(node):
                for kind, kept in ((LINK, joined.links), (CHANNEL, joined.channels)):
                    kept[rank] = _connected(host, port, key)
                    _say(kept[rank], Hello(node=node, session=session, kind=kind, rank=rank))
            if _is_on(bridge, is_over):
                return joined
        except BaseException:
            joined.close()
            raise
        joined.close()
    return None


def _is_on(bridge: socket.socket, is_over: Callable[[], bool]) -> bool:
    """Wait for the word that all have joined. Raises OSError."""
    while not select.select([bridge], [], [], LOOK_S)[0]:
        if is_over():
            return False
    try:
        return receive_message(bridge) == GO
    except ConnectionError as error:
        raise ConnectionResetError(f"node 0 left before all nodes had joined ({error})") from None


def _connected(host: str, port: int, key: bytes) -> socket.socket:
    end = socket.create_connection((host, port), timeout=CONNECT_S)
    try:
        introduce(tuned(end), key)
        end.settimeout(None)
    except BaseException:
        end.close()
        raise
    return end


def _say(end: socket.socket, hello: Hello) -> None:
    """Send a hello and hear the answer. Raises DiffersError with node 0's reason."""
    end.settimeout(GREETING_S)
    send_message(end, msgspec.json.encode(hello))
    if reason := receive_message(end).decode(errors="replace"):
        raise DiffersError(reason)
    end.settimeout(None)
