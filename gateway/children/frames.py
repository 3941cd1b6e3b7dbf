"""The child's side: frames of four bytes of length and msgpack on stdin and stdout, and bounds that the system holds."""

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
    """Empty at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    return stream.read(LENGTH.unpack(head)[0])


def write_frame(stream: BinaryIO, message: msgspec.Struct) -> None:
    raw = msgspec.msgpack.encode(message)
    stream.write(LENGTH.pack(len(raw)) + raw)
    stream.flush()


def bound_memory(num_bytes: int) -> None:
    """Let this process have so much more than it has now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def processor_time(most_s: float) -> Iterator[None]:
    """SIGPROF ends this process when what is done inside takes more processor time: a pause is nobody's doing."""
    signal.setitimer(signal.ITIMER_PROF, most_s)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
