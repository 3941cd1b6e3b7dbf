"""Nodes join a worker from another host with its secret and its model, and nobody else does."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest

from engine.parallel.nodes import joining, wire
from engine.parallel.nodes.joining import DiffersError, Joined, Meeting, Places, join
from engine.parallel.nodes.wire import GREETING, RefusedError, introduce, key_of, receive_message, send_message
from tests.unit.engine.nodes.hosts import PATIENCE_S

KEY = key_of("decode-0:secret")
FACTS = {"release": "1.0", "--model": "3fa2", "--dtype": "float32"}
PLACES = Places(3, 6)


class Met:
    """A meeting that waits in a thread."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.meeting = Meeting("127.0.0.1", 0, KEY, PLACES, FACTS)
        self.port = self.meeting.port
        self._threads = ThreadPoolExecutor(8)
        self.waiting: Future[list[Joined]] = self._threads.submit(self.meeting.wait, self.over.is_set)
        self._joined = list[Joined]()

    def join(self, node: int, key: bytes = KEY, **facts: str) -> Future[Joined | None]:
        return self._threads.submit(join, "127.0.0.1", self.port, key, node, PLACES, FACTS | facts, self.over.is_set)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def close(self) -> None:
        self.over.set()
        self._threads.shutdown()


@pytest.fixture
def met() -> Iterator[Met]:
    found = Met()
    try:
        yield found
    finally:
        found.close()


def all_join(met: Met) -> list[Joined]:
    """Have all nodes join, and see that their ends are the leader's."""
    others = [met.join(node) for node in (2, 1)]
    here, there = met.waiting.result(PATIENCE_S), [each.result(PATIENCE_S) for each in reversed(others)]
    assert [each.node for each in here] == [1, 2]
    for ours, theirs in zip(here, there, strict=True):
        assert theirs is not None
        for kept in (ours.links, ours.channels, theirs.links, theirs.channels):
            assert sorted(kept) == [*PLACES.on(ours.node)]
        for rank in PLACES.on(ours.node):
            for mine, its in ((ours.links, theirs.links), (ours.channels, theirs.channels)):
                its[rank].sendall(bytes([rank]))
                assert mine[rank].recv(1) == bytes([rank])
        ours.close()
        theirs.close()
    return here


def test_all_nodes_join_in_any_order_and_nobody_after_them(met: Met) -> None:
    all_join(met)
    with pytest.raises(ConnectionRefusedError):
        met.connect()


def test_places_are_neighbours() -> None:
    assert [[*PLACES.on(node)] for node in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"--model": "77ab"}, "^--model: 3fa2 on node 0, 77ab here$"),
        (
            {"release": "0.9", "--dtype": "bfloat16"},
            "^release: 1.0 on node 0, 0.9 here; --dtype: float32 on node 0, bfloat16 here$",
        ),
        ({"unheard-of": "1"}, "run the same release everywhere"),
    ],
)
def test_what_differs_is_told_to_who_joins(facts: dict[str, str], told: str, met: Met) -> None:
    with pytest.raises(DiffersError, match=told):
        met.join(1, **facts).result(PATIENCE_S)
    all_join(met)


@pytest.mark.parametrize("node", [0, 3, -1])
def test_a_number_that_no_node_has_is_refused(node: int, met: Met) -> None:
    with pytest.raises(DiffersError, match=f"--nnodes: there is no node {node} of 3"):
        met.join(node).result(PATIENCE_S)


def test_a_second_node_with_the_same_number_is_refused_until_the_first_one_left(met: Met) -> None:
    with raw(met) as first:
        hello(first, kind="bridge", session="a")
        with pytest.raises(
            DiffersError, match=r"--nnodes: node 1 has joined already, from 127\.0\.0\.1: give each its own number"
        ):
            met.join(1).result(PATIENCE_S)
    all_join(met)


def test_another_secret_is_refused_on_both_sides(met: Met, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "baton.nodes"), pytest.raises(RefusedError, match="another secret"):
        met.join(1, key=key_of("decode-0:guessed")).result(PATIENCE_S)
    all_join(met)
    assert "node.refused" in caplog.messages


def test_a_node_takes_nobody_without_the_secret_for_its_leader() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port, ThreadPoolExecutor(1) as threads:
        joins = threads.submit(
            join, "127.0.0.1", port.getsockname()[1], KEY, 1, PLACES, FACTS, threading.Event().is_set
        )
        end, _ = port.accept()
        with end:
            end.sendall(GREETING + bytes(32))
            wire.exactly(end, len(GREETING) + 64)
            end.sendall(bytes(32))
            with pytest.raises(RefusedError, match="another secret"):
                joins.result(PATIENCE_S)
            assert end.recv(1) == b""  # nothing else was said


@pytest.mark.parametrize(
    "begins",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", bytes(1), b"b" * 65536, GREETING[:5], GREETING + bytes(63)],
    ids=["http", "tls", "zero", "flood", "half", "truncated"],
)
def test_nothing_else_on_the_port_is_let_in(begins: bytes, met: Met) -> None:
    with met.connect() as end:
        greeting = wire.exactly(end, len(GREETING) + 32)
        assert greeting.startswith(GREETING)
        with contextlib.suppress(OSError):  # it may be closed already
            end.sendall(begins)
            end.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert end.recv(1) == b""
    all_join(met)


def test_who_says_nothing_is_let_go(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GREETING_S", 0.1)
    with met.connect() as end:
        assert end.recv(1 << 10)
        assert end.recv(1) == b""
    monkeypatch.undo()
    all_join(met)


def test_no_more_than_a_few_are_greeted_at_a_time(met: Met) -> None:
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(met.connect()) for _ in range(joining.MOST_GREETED)]
        for end in ends:
            assert wire.exactly(end, len(GREETING) + 32)
        with met.connect() as another, contextlib.suppress(ConnectionResetError):
            assert another.recv(1) == b""
    all_join(met)


@pytest.mark.parametrize(
    "message",
    [b"", b"{", b'{"node": 1}', b'{"node": 1, "session": "a", "kind": "bridge", "more": 1}', bytes(60_000)],
    ids=["empty", "half", "lacking", "unknown", "zeros"],
)
def test_a_first_message_of_another_form_is_refused(message: bytes, met: Met) -> None:
    with raw(met) as end:
        send_message(end, message)
        assert end.recv(1) == b""
    all_join(met)


def test_a_message_that_is_too_large_is_not_read(met: Met) -> None:
    with raw(met) as end:
        end.sendall((1 << 31).to_bytes(4, "little"))
        assert end.recv(1) == b""
    all_join(met)


def test_links_are_taken_of_the_node_that_joined_alone(met: Met) -> None:
    with contextlib.ExitStack() as stack:
        bridge, *more = [stack.enter_context(raw(met)) for _ in range(6)]
        assert "has not joined" in hello(more[0], kind="link", session="a", rank=2)
        assert hello(bridge, kind="bridge", session="a") == ""
        assert "joins again" in hello(more[1], kind="link", session="b", rank=2)
        assert "process 1 is not one of node 1's" in hello(more[2], kind="link", session="a", rank=1)
        assert hello(more[3], kind="link", session="a", rank=2) == ""
        assert "joins again" in hello(more[4], kind="link", session="a", rank=2)


def test_a_second_link_is_refused_before_the_first_one_is_kept(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    answered, goes_on = threading.Event(), threading.Event()

    def send_and_stay(end: socket.socket, message: bytes) -> None:
        send_message(end, message)
        if not message and not answered.is_set():
            answered.set()
            assert goes_on.wait(PATIENCE_S)

    with raw(met) as bridge, raw(met) as first, raw(met) as second:
        assert hello(bridge, kind="bridge", session="a") == ""
        monkeypatch.setattr(joining, "send_message", send_and_stay)
        assert hello(first, kind="link", session="a", rank=2) == ""
        assert "joins again" in hello(second, kind="link", session="a", rank=2)
        goes_on.set()


def test_waiting_ends_with_the_leader(met: Met) -> None:
    there = met.join(1)
    met.over.set()
    assert met.waiting.result(PATIENCE_S) == []
    with contextlib.suppress(ConnectionError):
        assert there.result(PATIENCE_S) is None


@contextlib.contextmanager
def raw(met: Met) -> Iterator[socket.socket]:
    """A connection that showed the secret."""
    with met.connect() as end:
        introduce(end, KEY)
        yield end


def hello(end: socket.socket, *, kind: str, session: str, rank: int = 0) -> str:
    """Say hello as node 1; return the answer."""
    facts = FACTS if kind == "bridge" else {}
    send_message(end, msgspec.json.encode(joining.Hello(node=1, session=session, kind=kind, rank=rank, facts=facts)))
    return receive_message(end).decode()
