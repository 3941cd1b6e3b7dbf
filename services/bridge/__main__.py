"""The bridge of a worker's host: the first process there starts it. Its argument is `Built` as JSON."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys

import msgspec

from engine.parallel.layout import num_bytes
from engine.parallel.nodes.bridge import Side, run
from engine.parallel.nodes.bridged import Built
from engine.parallel.nodes.mirror import Mirror

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # it ends with its parent, which drains
        signal.signal(number, signal.SIG_IGN)
    built = msgspec.json.decode(sys.argv[1], type=Built)
    memory = mmap.mmap(built.memory, num_bytes(built.size))
    sides = [
        Side(
            each.name, socket.socket(fileno=each.end), Mirror(memory, built.size, theirs=each.theirs, width=built.width)
        )
        for each in built.sides
    ]
    run(sides, socket.socket(fileno=built.parent))
    os._exit(0)  # threads that wait for what other hosts send are not waited for
