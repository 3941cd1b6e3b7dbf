"""Followers as processes: what they say, how they end, and what the leader hears of it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.parallel.followers import Followers
from engine.parallel.group import RankLostError
from engine.parallel.pulse import Pulse, beat

# It answers with what it is sent, and ends with its channel.
ECHO = """
import socket, sys
rank, _, link, channel = map(int, sys.argv[1:5])
link, channel = socket.socket(fileno=link), socket.socket(fileno=channel)
head = link.recv(4, socket.MSG_WAITALL)
link.sendall(head + link.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
sys.exit(3 if channel.recv(1) else 0)
"""


# It counts its beats, a few hundred a second, and does nothing else.
BEATS = """
import mmap, sys, time
rank, size, _, _, memory = map(int, sys.argv[1:6])
words = memoryview(mmap.mmap(memory, 0)).cast("q")
while True:
    words[8 * rank + 3] += 1
    time.sleep(0.002)
"""


@contextmanager
def running(size: int, command: str = ECHO) -> Iterator[Followers]:
    followers = Followers(size, [sys.executable, "-S", "-c", command])
    try:
        yield followers
    finally:
        followers.close()


def until_a_problem(followers: Followers) -> str:
    while not (problem := followers.problem()):
        os.sched_yield()
    return problem


def send_for_ever(followers: Followers) -> None:
    while True:
        followers.send(bytes(1024))


def test_a_machine_without_memory_for_ranks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*said: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="No space left on device"):
        Followers(2, [sys.executable])


def test_a_leader_waits_until_all_have_loaded() -> None:
    with running(3) as followers:
        handles = [os.pidfd_open(pid) for pid in followers.pids]
        followers.send(b"")
        followers.wait()
        assert (followers.problem(), followers.refused) == ("", False)
    for handle in handles:  # ended, and waited for
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(handle, 0)
        os.close(handle)


def test_the_reason_of_one_that_cannot_load_is_told_also_after_its_end() -> None:
    with running(2) as followers:
        followers.send(b"no room")
        with pytest.raises(RankLostError, match="rank 1: no room"):
            followers.wait()
        followers.channels[0].sendall(b".")
        assert until_a_problem(followers) == "rank 1: no room"
        assert followers.refused


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_dies_is_named(number: signal.Signals) -> None:
    with running(3) as followers:
        pid = followers.pids[1]
        os.kill(pid, number)
        assert until_a_problem(followers) == f"rank 2 (pid {pid}) ended with signal {number.name}"
        with pytest.raises(RankLostError, match="rank 2"):
            followers.wait()
        assert not followers.refused


def test_one_that_closed_its_link_is_named_before_its_process_has_ended() -> None:
    closes = """
import os, socket, sys, time
rank, _, link = map(int, sys.argv[1:4])
if rank == 1:
    os.close(link)
    time.sleep(3600)
taken = socket.socket(fileno=link)
while taken.recv(1 << 16):
    pass
time.sleep(3600)
"""
    with running(3, closes) as followers:
        with pytest.raises(RankLostError, match=rf"^rank 1 \(pid {followers.pids[0]}\) takes no more passes") as raised:
            send_for_ever(followers)
        assert followers.problem() == str(raised.value)
        os.kill(followers.pids[0], 0)  # it lives
        for pid in followers.pids:
            os.kill(pid, signal.SIGKILL)


def test_one_that_leaves_by_itself_is_lost_as_well() -> None:
    with running(2) as followers:
        followers.send(b"")
        followers.wait()
        followers.channels[0].sendall(b".")
        assert until_a_problem(followers) == f"rank 1 (pid {followers.pids[0]}) ended with exit code 3"


def test_one_that_is_stopped_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(3, BEATS) as followers:
        while not all(followers.group.beats(rank) for rank in (1, 2)):
            assert not followers.problem()
        pid = followers.pids[1]
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr("engine.parallel.pulse.LOADING_S", 2.0)
        said = until_a_problem(followers)
        assert said.startswith(f"rank 2 (pid {pid}) stands still: no sign of life for ")
        assert select.select([handle], [], [], 60)[0], "it was not ended"
        os.close(handle)
        assert followers.problem() == said
        assert not followers.refused


def test_a_pulse_is_judged_by_what_its_leader_saw() -> None:
    now, count = 100.0, 0
    pulse = Pulse(lambda: count, clock=lambda: now)
    now += 50
    assert pulse.still_s() == 0  # it has not begun
    count = 1
    assert pulse.still_s() == 0
    for _ in range(5):
        now += 0.5
        pulse.still_s()
    assert pulse.still_s() == 2.5
    now += 1000  # the leader itself was stopped
    assert pulse.still_s() == 3.5
    count += 1
    assert pulse.still_s() == 0


def test_a_rank_beats_by_itself() -> None:
    beaten = threading.Event()
    beat(beaten.set)
    assert beaten.wait(60)
