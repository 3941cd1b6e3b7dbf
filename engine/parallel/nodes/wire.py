"""Connections between a worker's hosts: who they are with is known before anything else is read, and their end within seconds.

    node 0                                     another node
    greeting, a number of its own      ──►
                                       ◄──     greeting, its number, proof that it has the secret
    the same proof                     ──►
                                       ◄──►    messages, then frames

A proof is a keyed digest of both numbers and the side, so none is of use twice. What follows is neither encrypted nor
signed, as keys and values between workers aren't: it is for a network of one's own.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from hashlib import blake2b

GREETING = b"baton/nodes/1\n"
NUMBER_BYTES = PROOF_BYTES = 32
MOST_MESSAGE_BYTES = 64 << 10
GREETING_S = 5.0
SILENT_MS = 1500  # a host that takes no packets for so long is lost
_LENGTH = struct.Struct("<I")


class RefusedError(ConnectionError):
    """The other end has another secret, or is none of ours."""


def key_of(secret: str) -> bytes:
    """The key of proofs."""
    return blake2b(secret.encode(), digest_size=32, person=b"baton nodes").digest()


def tuned(end: socket.socket) -> socket.socket:
    """Return the connection, set to send at once and to end soon after the other host does."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", SILENT_MS),
    ):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return end


def fill(end: socket.socket, view: memoryview) -> None:
    """Read until the view is full. Raises ConnectionError at the end of what comes, OSError."""
    while view:
        if not (got := end.recv_into(view)):
            raise ConnectionResetError("it closed the connection")
        view = view[got:]


def exactly(end: socket.socket, count: int) -> bytes:
    """Read so many bytes. Raises as `fill`."""
    found = bytearray(count)
    fill(end, memoryview(found))
    return bytes(found)


def greet(end: socket.socket, key: bytes) -> None:
    """Let a connection in that has the secret, and show that we have it, too. Raises RefusedError, OSError."""
    with _within(end, GREETING_S) as until:
        ours = secrets.token_bytes(NUMBER_BYTES)
        end.sendall(GREETING + ours)
        _expect_greeting(end, until)
        theirs, proof = _timed(end, NUMBER_BYTES, until), _timed(end, PROOF_BYTES, until)
        if not hmac.compare_digest(proof, _proof(key, b"joins", ours, theirs)):
            raise RefusedError("it has another secret")
        end.sendall(_proof(key, b"leads", ours, theirs))


def introduce(end: socket.socket, key: bytes) -> None:
    """Show node 0 that we have the secret, and see that it has it, too. Raises RefusedError, OSError."""
    with _within(end, GREETING_S) as until:
        _expect_greeting(end, until)
        theirs, ours = _timed(end, NUMBER_BYTES, until), secrets.token_bytes(NUMBER_BYTES)
        end.sendall(GREETING + ours + _proof(key, b"joins", theirs, ours))
        try:
            proof = _timed(end, PROOF_BYTES, until)
        except ConnectionError:
            raise RefusedError("it closed the connection: it has another secret, or left") from None
        if not hmac.compare_digest(proof, _proof(key, b"leads", theirs, ours)):
            raise RefusedError("it has another secret")


def send_message(end: socket.socket, message: bytes) -> None:
    """Send a message. Raises OSError."""
    end.sendall(_LENGTH.pack(len(message)) + message)


def receive_message(end: socket.socket) -> bytes:
    """Wait for a message. Raises ConnectionError, also for one that is too large, and OSError."""
    (count,) = _LENGTH.unpack(exactly(end, _LENGTH.size))
    if count > MOST_MESSAGE_BYTES:
        raise RefusedError(f"a message of {count} bytes: at most {MOST_MESSAGE_BYTES} are read")
    return exactly(end, count)


def _expect_greeting(end: socket.socket, until: float) -> None:
    """Read byte by byte what is to be a greeting: nothing behind another beginning is read."""
    for at in range(len(GREETING)):
        if _timed(end, 1, until) != GREETING[at : at + 1]:
            raise RefusedError("it speaks something else, or is of another release")


def _proof(key: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return blake2b(side + first + second, key=key, digest_size=PROOF_BYTES).digest()


def _timed(end: socket.socket, count: int, until: float) -> bytes:
    found = b""
    while len(found) < count:
        end.settimeout(max(1e-3, until - time.monotonic()))
        if not (got := end.recv(count - len(found))):
            raise ConnectionResetError("it closed the connection")
        found += got
    return found


@contextlib.contextmanager
def _within(end: socket.socket, timeout_s: float) -> Iterator[float]:
    before = end.gettimeout()
    end.settimeout(timeout_s)
    try:
        yield time.monotonic() + timeout_s
    finally:
        end.settimeout(before)
