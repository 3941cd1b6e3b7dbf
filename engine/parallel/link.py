"""The leader's link to one follower: frames of bytes over a socket, whose end is the other's death."""

from __future__ import annotations

import contextlib
import socket
import struct

from engine.parallel.group import RankLostError

_LENGTH = struct.Struct("<I")


class Link:
    """One end. One thread at a time in each direction."""

    def __init__(self, end: socket.socket, *, longest_wait_s: float | None = None) -> None:
        """`longest_wait_s`: for room to send into, before the other counts as lost."""
        self._socket = end
        self._socket.settimeout(longest_wait_s)

    def send(self, frame: bytes) -> None:
        """Send a frame. Raises RankLostError."""
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:  # includes timeouts
            raise RankLostError(f"takes no more passes ({error})") from error

    def receive(self) -> bytes | None:
        """Wait for a frame; None: the other end is closed. Raises TimeoutError."""
        head = self._exactly(_LENGTH.size)
        return None if head is None else self._exactly(*_LENGTH.unpack(head))

    def _exactly(self, count: int) -> bytes | None:
        found = bytearray(count)
        view = memoryview(found)
        while view:
            try:
                got = self._socket.recv_into(view)
            except ConnectionError:
                return None
            if not got:
                return None
            view = view[got:]
        return bytes(found)

    def close(self) -> None:
        """Close it; whoever waits for a frame, here or at the other end, hears of it."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
