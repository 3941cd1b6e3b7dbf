"""The bridge of a host: threads that carry what is new in its memory to other hosts, and from there.

It is a process of its own: the engine's threads would keep it waiting for the interpreter, and it them. It loads no torch.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.parallel.layout import AFTER_A_LOSS, WELL
from engine.parallel.nodes.bridged import EVERYBODY, said, words_in
from engine.parallel.nodes.mirror import HEAD, Frame, Kind, Mirror, frame
from engine.parallel.nodes.wire import fill, receive_message, send_message
from engine.parallel.pulse import STANDS_S, Pulse

BEAT_S = 0.25
FLUSH_S = 1.0  # bound on sending the last frames
SWITCH_S = 1e-4  # a thread that looks for news lets others go on
_SPINS = 500
_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3
_SLEEPS_A_WAIT = 32  # a longer wait ends this part of itself later at most


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a thread of the bridge saw: `side` is lost, or a process's last words, from there or from here."""

    side: Side | None
    rank: int = EVERYBODY
    words: str = ""


class Side:
    """Another host as this one's bridge sees it: `name` is for people."""

    def __init__(self, name: str, end: socket.socket, mirror: Mirror) -> None:
        self.name, self.end, self.mirror = name, end, mirror
        self._said = queue.SimpleQueue[Frame]()
        self._frames = 0
        self._closing = threading.Event()
        self.pulse = Pulse(lambda: self._frames)
        self.is_lost = False
        self._sending = threading.Thread()

    def start(self, happened: Callable[[Event], None]) -> None:
        """Start its threads."""
        self._sending = threading.Thread(target=self._run, args=(self._send, happened), name="sends", daemon=True)
        self._sending.start()
        receive = partial(self._receive, happened)
        threading.Thread(target=self._run, args=(receive, happened), name="receives", daemon=True).start()

    def say(self, rank: int, words: str) -> None:
        """Send last words about a process."""
        self._said.put(frame(Kind.SAID, rank, 0, words.encode()))

    def close(self) -> None:
        """Send what is new, then end the connection."""
        self._closing.set()
        self._sending.join(FLUSH_S)
        self.end.close()

    def _run(self, work: Callable[[], None], happened: Callable[[Event], None]) -> None:
        try:
            work()
        except OSError as error:
            happened(Event(self, words=error.strerror or str(error)))

    def _receive(self, happened: Callable[[Event], None]) -> None:
        head, fills = bytearray(HEAD.size), partial(fill, self.end)
        while True:
            fills(memoryview(head))
            if (told := self.mirror.take(bytes(head), fills)) is not None:
                happened(Event(self, *told))
            self._frames += 1

    def _send(self) -> None:
        beats_at = idle_from = 0.0
        idle = 0
        while True:
            is_closing = self._closing.is_set()
            has_sent = self._send_news()
            now = time.monotonic()
            if now >= beats_at:
                beats_at = now + BEAT_S
                self._put(self.mirror.beats())
            if is_closing:
                self.end.shutdown(socket.SHUT_WR)
                return
            idle = 0 if has_sent else idle + 1
            if idle <= 1:
                idle_from = now
            if idle > _SPINS:
                time.sleep(min(_LONGEST_SLEEP_S, max(_SLEEP_S, (now - idle_from) / _SLEEPS_A_WAIT)))
            else:
                os.sched_yield()

    def _send_news(self) -> bool:
        has_sent = False
        for each in self.mirror.news():
            self._put(each)
            has_sent = True
        while not self._said.empty():
            self._put(self._said.get())
        return has_sent

    def _put(self, each: Frame) -> None:
        *first, last = (each.head, *filter(len, each.parts))
        if first:
            self.end.sendall(b"".join(first), socket.MSG_MORE)
        self.end.sendall(last)


def run(sides: Sequence[Side], parent: socket.socket) -> None:
    """Carry until the parent closes its end: see `Bridged`, which this one talks to."""
    sys.setswitchinterval(SWITCH_S)
    events = queue.SimpleQueue[Event]()
    threading.Thread(target=_listen, args=(parent, events), name="parent", daemon=True).start()
    for side in sides:
        side.start(events.put)
    while True:
        try:
            event = events.get(timeout=BEAT_S)
        except queue.Empty:
            for side in sides:
                if (still_s := side.pulse.still_s()) > STANDS_S:
                    _lose(side, f"no sign of life for {still_s:.0f} s", parent)
            continue
        if event.side is not None and event.rank == EVERYBODY:
            _lose(event.side, event.words, parent)
        elif event.side is not None:
            _tell(parent, event.rank, event.words)
        elif event.rank == EVERYBODY:
            break
        else:
            for side in sides:
                side.say(event.rank, event.words)
    for side in sides:
        side.close()


def _listen(parent: socket.socket, events: queue.SimpleQueue[Event]) -> None:
    try:
        while True:
            events.put(Event(None, *words_in(receive_message(parent))))
    except OSError:
        events.put(Event(None))


def _lose(side: Side, reason: str, parent: socket.socket) -> None:
    """Tell of a lost host, once: first the parent, so that whoever hears that a process left can ask it why."""
    if not side.is_lost:
        side.is_lost = True
        ends = {WELL: "", AFTER_A_LOSS: f"{side.name} ended, since it lost another process"}
        _tell(parent, EVERYBODY, ends.get(side.mirror.dismissed, f"{side.name} is lost: {reason}"))
        side.mirror.leave()


def _tell(parent: socket.socket, rank: int, words: str) -> None:
    try:
        send_message(parent, said(rank, words))
    except OSError:
        return  # it has ended, which the other thread sees
