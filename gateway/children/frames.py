"""The child's side: length-prefixed msgpack frames on stdin and stdout, and limits enforced by the system."""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

LENGTH = struct.Struct("<I")


def read_frame(stream: BinaryIO) -> bytes:
    """Read a frame; empty at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    return stream.read(LENGTH.unpack(head)[0])


def write_frame(stream: BinaryIO, message: msgspec.Struct) -> None:
    raw = msgspec.msgpack.encode(message)
    stream.write(LENGTH.pack(len(raw)) + raw)
    stream.flush()


def bound_memory(num_bytes: int) -> None:
    """Limit this process's memory to so much more than now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def processor_time(most_s: float) -> Iterator[None]:
    """Context manager: SIGPROF ends the process after this much processor time; pauses don't count."""
    signal.setitimer(signal.ITIMER_PROF, most_s)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
