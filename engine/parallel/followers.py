"""Followers as processes of their own: `Led`."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from engine.parallel import pulse
from engine.parallel.child import Child
from engine.parallel.group import RankLostError
from engine.parallel.link import Link
from engine.parallel.nodes.bridged import EVERYBODY, Bridged
from engine.parallel.nodes.joining import Joined
from engine.parallel.pulse import Pulse
from engine.parallel.shared_memory import LONGEST_WAIT_S, SharedMemoryGroup

LOOK_S = 0.05
LAST_WORD_S = 1.0  # bound on reading a dead process's last word


class Followers:
    """Ranks 1 to `size` - 1. They end when this process does, whatever ends it: their links close.

    Each has a link, for passes, and a channel, a connected socket for what else the two processes have to say.
    """

    def __init__(
        self,
        size: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        joined: Sequence[Joined] = (),
        bridge: Callable[[int], Bridged] | None = None,
    ) -> None:
        """Start them: `command RANK SIZE LINK CHANNEL MEMORY LEADER`, the descriptors and the pid as numbers.

        Those that other nodes `joined` with run there; `bridge(memory)` starts what carries this host's memory to them.
        Call it in the main thread. Raises OSError.
        """
        self._followers = list[_Follower]()
        self._bridged: Bridged | None = None
        self._pids = list[int]()
        num_bytes = SharedMemoryGroup.num_bytes(size)
        shared = os.memfd_create("ranks")
        try:
            os.ftruncate(shared, num_bytes)
            self.group = SharedMemoryGroup(mmap.mmap(shared, num_bytes), rank=0, size=size, lost=self.problem)
            self._bridged = bridge(shared) if bridge is not None else None
            self._start(size, shared, command, environment, joined)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(shared)

    def _start(
        self,
        size: int,
        shared: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        joined: Sequence[Joined],
    ) -> None:
        elsewhere = {rank: node for node in joined for rank in node.links}
        for rank in range(1, size):
            beats = Pulse(partial(self.group.beats, rank))
            if (node := elsewhere.get(rank)) is not None:
                assert self._bridged is not None, "a bridge reaches other nodes"
                process: _Process = _OnNode(rank, node.name, self._bridged)
                follower = _Follower(rank, node.links[rank], node.channels[rank], process, beats)
            else:
                ours, theirs = socket.socketpair()
                channel, its = socket.socketpair()
                with theirs, its:
                    process = Child(rank, [*command, str(rank), str(size)], (theirs, its), shared, environment)
                self._pids.append(process.pid)
                follower = _Follower(rank, ours, channel, process, beats)
            self._followers.append(follower)

    @property
    def channels(self) -> list[socket.socket]:
        """The channels, by rank."""
        return [follower.channel for follower in self._followers]

    @property
    def pids(self) -> list[int]:
        """The process ids of those on this host, by rank."""
        return self._pids

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

    def close(self, *, is_well: bool = True) -> None:
        """End the followers; not `is_well`: whoever started those of other nodes is to start them again."""
        if hasattr(self, "group"):
            self.group.dismiss(is_well=is_well and not self.problem())
            self.group.leave()
        for follower in self._followers:
            follower.leave()
        for follower in self._followers:
            follower.end()
        if self._bridged is not None:
            self._bridged.close()


class _Process(Protocol):
    """A follower's process, as far as its leader knows of it."""

    name: str
    last_words_s: float  # how long after its link closed it may take to hear why

    def ended(self) -> tuple[str, bool]:
        """Return how it ended, "" while it lives, and whether its link may say why."""
        ...

    def kill(self) -> None: ...

    def end(self) -> None:
        """Wait for its end; kill it if it hangs."""
        ...


class _OnNode:
    """A process of another host, which that host's first one starts and ends: see `_Process`."""

    last_words_s = LAST_WORD_S

    def __init__(self, rank: int, node: str, bridged: Bridged) -> None:
        self._rank, self._bridged = rank, bridged
        self.name = f"rank {rank} on {node}"

    def ended(self) -> tuple[str, bool]:
        if words := self._bridged.said_of(self._rank):
            return words, True
        return self._bridged.said_of(EVERYBODY) or "", False

    def kill(self) -> None:
        """No-op: its host does, once it is left."""

    def end(self) -> None:
        """No-op, as `kill`."""


class _Follower:
    """One of them, as its leader sees it."""

    def __init__(self, rank: int, link: socket.socket, channel: socket.socket, process: _Process, beats: Pulse) -> None:
        self.rank, self.link, self.channel = rank, Link(link, longest_wait_s=LONGEST_WAIT_S), channel
        self._process = process
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
            until = time.monotonic() + self._process.last_words_s
            while not self._process.ended()[0] and time.monotonic() < until:
                time.sleep(LOOK_S)
            self._cut_off = f"{self._process.name} {error}"
            raise RankLostError(self.problem()) from error

    def problem(self) -> str:
        """The reason that it computes no more; "" while it lives."""
        ended, may_say_why = self._process.ended()
        if may_say_why:
            self._hearing.join(LAST_WORD_S)
        if self.reason:
            return f"rank {self.rank}: {self.reason}"
        if self._stands:
            return self._stands
        if ended:
            return ended
        if self._cut_off:  # a process with a GPU may take seconds to end
            return self._cut_off
        still_s = self._pulse.still_s()
        if still_s > (pulse.STANDS_S if self.has_loaded.is_set() else pulse.LOADING_S):
            self._stands = f"{self._process.name} stands still: no sign of life for {still_s:.0f} s"
            self._process.kill()  # it would keep its memory for as long as it is stopped
        return self._stands

    def leave(self) -> None:
        """Close link and channel, which ends it."""
        self.link.close()
        with contextlib.suppress(OSError):  # closed already
            self.channel.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """See `_Process.end`."""
        self._process.end()
