"""A host's bridge, a process, as the one that starts it sees it, and the few words between the two."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence

import msgspec

from engine.parallel.nodes.joining import Joined, Places
from engine.parallel.nodes.mirror import MOST_WORDS_BYTES
from engine.parallel.nodes.wire import receive_message, send_message
from engine.parallel.pulse import described

END_S = 3.0
EVERYBODY = -1  # a process's number: words about a whole host
_RANK = struct.Struct("<h")


class OtherSide(msgspec.Struct, frozen=True):
    """Another host: its name for people, the descriptor of the connection, and the processes on that side."""

    name: str
    end: int
    theirs: list[int]


class Built(msgspec.Struct, frozen=True):
    """A bridge's first words, on its command line: descriptors of the memory and of its parent's end."""

    size: int
    width: int
    memory: int
    parent: int
    sides: list[OtherSide]


def said(rank: int, words: str) -> bytes:
    """Return a message between a bridge and its parent."""
    return _RANK.pack(rank) + words.encode()[:MOST_WORDS_BYTES]


def words_in(message: bytes) -> tuple[int, str]:
    """Read what `said` wrote."""
    return *_RANK.unpack_from(message), message[_RANK.size :].decode(errors="replace")


class Bridged:
    """The bridge of this host to others; they are lost, or end, as it says. Its connections are its own from then on."""

    def __init__(
        self,
        command: Sequence[str],
        memory: int,
        places: Places,
        others: Sequence[Joined],
        *,
        node: int = 0,
        width: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it: `command` and `Built` as JSON. `memory`: a descriptor; `width`: ranks of each stage. Raises OSError."""
        everybody = range(places.size)
        own = places.on(node)
        theirs = {
            each.node: [*places.on(each.node)] if node == 0 else [one for one in everybody if one not in own]
            for each in others
        }
        sides = [OtherSide(each.name, each.bridge.fileno(), theirs[each.node]) for each in others]
        self._end, its = socket.socketpair()
        with its:
            built = Built(places.size, width, memory, its.fileno(), sides)
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(built).decode()],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(memory, its.fileno(), *(side.end for side in sides)),
                start_new_session=True,
            )
        for each in others:
            each.bridge.close()
        self._said: dict[int, str] = {}
        self._reading = threading.Lock()

    def said_of(self, rank: int) -> str | None:
        """The last words about a process, or about a host (`EVERYBODY`: "" once the leader ended all). None: there are none."""
        with self._reading:
            while select.select([self._end], [], [], 0)[0]:
                try:
                    about, words = words_in(receive_message(self._end))
                except OSError:
                    code = self._process.wait(END_S)
                    self._said.setdefault(
                        EVERYBODY, f"the bridge to other hosts (pid {self._process.pid}) ended with {described(code)}"
                    )
                    break
                self._said.setdefault(about, words)
            return self._said.get(rank)

    def say(self, rank: int, words: str) -> None:
        """Tell the other hosts about a process of this one."""
        with contextlib.suppress(OSError):
            send_message(self._end, said(rank, words))

    def close(self) -> None:
        """End it, once it has sent what is new."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._end.close()
