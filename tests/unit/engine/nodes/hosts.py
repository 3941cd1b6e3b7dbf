"""Hosts in one process: a memory each, joined by bridges over TCP."""

from __future__ import annotations

import contextlib
import mmap
import queue
import socket
import threading
from collections.abc import Callable, Iterator

import torch

from engine.parallel.layout import num_bytes
from engine.parallel.nodes.bridge import Event, Side
from engine.parallel.nodes.joining import Places
from engine.parallel.nodes.mirror import HEAD, Frame, Mirror
from engine.parallel.nodes.wire import tuned
from engine.parallel.shared_memory import SharedMemoryGroup

PATIENCE_S = 60.0


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        one = socket.create_connection(port.getsockname())
        other, _ = port.accept()
    return tuned(one), tuned(other)


class Hosts:
    """`nodes` memories of `size` processes: a group for each process on its own host's. Node 0 is joined to each other one."""

    def __init__(self, size: int, nodes: int = 2, *, width: int = 1, lost: Callable[[], str] = str) -> None:
        self.places = Places(nodes, size)
        self.memories = [mmap.mmap(-1, num_bytes(size)) for _ in range(nodes)]
        homes = {rank: node for node in range(nodes) for rank in self.places.on(node)}
        self.groups = [
            SharedMemoryGroup(self.memories[homes[rank]], rank=rank, size=size, lost=lost) for rank in range(size)
        ]
        self.events = queue.SimpleQueue[tuple[int, Event]]()
        self.sides: list[tuple[Side, Side]] = []
        for node in range(1, nodes):
            ends, there = connected(), self.places.on(node)
            here = [rank for rank in range(size) if rank not in there]
            mirrors = (
                Mirror(self.memories[0], size, theirs=there, width=width),
                Mirror(self.memories[node], size, theirs=here, width=width),
            )
            names = (f"node {node}", "node 0")
            first, second = (Side(*each) for each in zip(names, ends, mirrors, strict=True))
            self.sides.append((first, second))

    @contextlib.contextmanager
    def joined(self) -> Iterator[Hosts]:
        """Context manager: the bridges carry."""
        for node, (first, second) in enumerate(self.sides, 1):
            first.start(lambda event: self.events.put((0, event)))
            second.start(lambda event, its=node: self.events.put((its, event)))  # type: ignore[misc]
        try:
            yield self
        finally:
            for pair in self.sides:
                for side in pair:
                    side.close()


def given(frames: Iterator[Frame], mirror: Mirror) -> int:
    """Hand frames to another host's mirror; return how many there were."""
    count = 0
    for each in frames:
        take(mirror, each.head, b"".join(each.parts))
        count += 1
    return count


def take(mirror: Mirror, head: bytes, rest: bytes = b"") -> tuple[int, str] | None:
    """Hand one frame to a mirror. Fails unless all of it is read."""
    left = memoryview(rest)

    def fill(view: memoryview) -> None:
        nonlocal left
        assert len(left) >= len(view), "more is read than its head says"
        view[:] = left[: len(view)]
        left = left[len(view) :]

    found = mirror.take(head, fill)
    assert not left
    return found


def head_of(kind: int, index: int, count: int, number: int) -> bytes:
    return HEAD.pack(kind, index, count, number)


class Words:
    """Words that threads wait for as streams do; see `tests/unit/engine/test_device_ring.py`."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._never = memory, threading.Event()

    def wait(self, word: int, number: int) -> None:
        for _ in range(int(PATIENCE_S / 1e-3)):
            if (int(self._memory[word : word + 4].view(torch.int32)) - number) % (1 << 32) < 1 << 31:
                return
            self._never.wait(1e-3)
        raise AssertionError(f"word {word} never came to {number}")

    def write(self, word: int, number: int) -> None:
        self._memory[word : word + 4].view(torch.int32).fill_((number + (1 << 31)) % (1 << 32) - (1 << 31))
