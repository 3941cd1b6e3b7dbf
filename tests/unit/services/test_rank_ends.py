"""A further rank outlives a leader that was killed, and does not wait for one that ends it."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.parallel.shared_memory import SharedMemoryGroup
from services.rank.process import Ends


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    with closing(process.stdin), process:  # type: ignore[type-var]
        yield process
        process.kill()


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, SharedMemoryGroup.num_bytes(2))
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def ends(leader: subprocess.Popen[bytes], memory: int) -> Iterator[Ends]:
    sockets = [*socket.socketpair(), *socket.socketpair()]
    ends = Ends(1, 2, sockets[0].detach(), sockets[2].detach(), os.dup(memory), leader.pid)
    yield ends
    ends.link.close()
    for each in (ends.channel, *sockets):
        each.close()


def test_it_waits_for_a_killed_leader_to_be_gone(leader: subprocess.Popen[bytes], ends: Ends) -> None:
    threading.Timer(0.1, leader.kill).start()
    ends.until_leader_is_gone()
    assert leader.poll() is not None


def test_a_leader_that_ends_it_is_not_waited_for(leader: subprocess.Popen[bytes], ends: Ends, memory: int) -> None:
    shared = mmap.mmap(memory, SharedMemoryGroup.num_bytes(2))
    SharedMemoryGroup(shared, rank=0, size=2).dismiss()
    ends.until_leader_is_gone()
    assert leader.poll() is None


def test_a_leader_that_is_gone_already_is_not_waited_for(leader: subprocess.Popen[bytes], ends: Ends) -> None:
    leader.kill()
    leader.wait()
    ends.until_leader_is_gone()
    assert ends.lost()
