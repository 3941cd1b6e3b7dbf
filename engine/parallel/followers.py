"""Followers as processes of their own: `Led`."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from engine.parallel import pulse
from engine.parallel.group import RankLostError
from engine.parallel.link import Link
from engine.parallel.pulse import Pulse
from engine.parallel.shared_memory import LONGEST_WAIT_S, SharedMemoryGroup

END_S = 5.0
LOOK_S = 0.05
LAST_WORD_S = 1.0  # bound on reading a dead process's last word


class Followers:
    """Ranks 1 to `size` - 1. They end when this process does, whatever ends it: their links close.

    Each has a link, for passes, and a channel, a connected socket for what else the two processes have to say.
    """

    def __init__(self, size: int, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        """Start them: `command RANK SIZE LINK CHANNEL MEMORY LEADER`, the descriptors and the pid as numbers.

        Call it in the main thread. Raises OSError.
        """
        self._followers = list[_Follower]()
        num_bytes = SharedMemoryGroup.num_bytes(size)
        shared = os.memfd_create("ranks")
        try:
            os.ftruncate(shared, num_bytes)
            self.group = SharedMemoryGroup(mmap.mmap(shared, num_bytes), rank=0, size=size, lost=self.problem)
            self._start(size, shared, command, environment)
        finally:
            os.close(shared)

    def _start(self, size: int, shared: int, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        try:
            for rank in range(1, size):
                beats = Pulse(partial(self.group.beats, rank))
                self._followers.append(_Follower(rank, size, shared, command, environment, beats))
        except BaseException:
            self.close()
            raise

    @property
    def channels(self) -> list[socket.socket]:
        """The channels, by rank."""
        return [follower.channel for follower in self._followers]

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [follower.process.pid for follower in self._followers]

    def problem(self) -> str:
        """See `Led.problem`."""
        return next(filter(None, (follower.problem() for follower in self._followers)), "")

    @property
    def refused(self) -> bool:
        """True if one said that it can't load its share; otherwise those that ended died."""
        return any(follower.reason for follower in self._followers)

    def send(self, *frames: bytes) -> None:
        """See `Led.send`."""
        for follower in self._followers:
            follower.send(frames)

    def wait(self) -> None:
        """See `Led.wait`."""
        while True:
            if problem := self.problem():
                raise RankLostError(problem)
            waiting = next((follower for follower in self._followers if not follower.has_loaded.is_set()), None)
            if waiting is None:
                return
            waiting.has_loaded.wait(LOOK_S)

    def close(self) -> None:
        """End the followers."""
        self.group.dismiss()
        self.group.leave()
        for follower in self._followers:
            follower.leave()
        for follower in self._followers:
            follower.end()


class _Follower:
    """One of them, as its leader sees it."""

    def __init__(
        self,
        rank: int,
        size: int,
        shared: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        beats: Pulse,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.channel, its = socket.socketpair()
        with theirs, its:
            passed = theirs.fileno(), its.fileno(), shared
            self.process = subprocess.Popen(
                [*command, *map(str, (rank, size, *passed, os.getpid()))],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # a terminal's Ctrl-C is for the leader, which drains
            )
        self.rank, self.link = rank, Link(ours, longest_wait_s=LONGEST_WAIT_S)
        self._name = f"rank {rank} (pid {self.process.pid})"
        self.has_loaded = threading.Event()
        self.reason = ""
        self._pulse, self._stands, self._cut_off = beats, "", ""
        self._hearing = threading.Thread(target=self._hear, name=f"rank-{rank}", daemon=True)
        self._hearing.start()

    def _hear(self) -> None:
        """Keep its one answer: nothing once it has loaded its share, or the reason that it can't."""
        while True:
            try:
                answer = self.link.receive()
            except TimeoutError:  # a large model may load longer
                continue
            except OSError:  # closed by us
                return
            if answer is None:
                return
            self.reason = answer.decode(errors="replace")
            if not self.reason:
                self.has_loaded.set()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send it frames. Raises RankLostError, which names it: its link closes some time before its process has ended."""
        try:
            for frame in frames:
                self.link.send(frame)
        except RankLostError as error:
            self._cut_off = f"{self._name} {error}"
            raise RankLostError(self.problem()) from error

    def problem(self) -> str:
        """The reason that it computes no more; "" while it lives."""
        code = self.process.poll()
        if code is not None:
            self._hearing.join(LAST_WORD_S)
        if self.reason:
            return f"rank {self.rank}: {self.reason}"
        if self._stands:
            return self._stands
        if code is not None:
            return f"{self._name} ended with {_described(code)}"
        if self._cut_off:  # a process with a GPU may take seconds to end
            return self._cut_off
        still_s = self._pulse.still_s()
        if still_s > (pulse.STANDS_S if self.has_loaded.is_set() else pulse.LOADING_S):
            self._stands = f"{self._name} stands still: no sign of life for {still_s:.0f} s"
            self.process.kill()  # it would keep its memory for as long as it is stopped
        return self._stands

    def leave(self) -> None:
        """Close link and channel, which ends it."""
        self.link.close()
        with contextlib.suppress(OSError):  # closed already
            self.channel.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Wait for its end; kill it if it hangs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.process.kill()
        self.process.wait()


def _described(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
