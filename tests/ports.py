"""Ports for servers that a test starts: nobody else takes one between its choice and its use, or while a server restarts.

`free_port` of the product asks the kernel, which gives the same number to the next one who asks. These are outside of the
kernel's range, and this process has them for as long as it lives: an abstract socket's name says so to the others.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys

from services.runtime.servers import free_port, port_is_free

LOWEST, COUNT = 12_000, 18_000  # below 32,768, where Linux begins to choose by itself
_held: list[socket.socket] = []
_numbers = itertools.count(os.getpid() * 7919)


def own_port(*, run: int = 1) -> int:
    """The first of `run` ports in a row that are this process's from now on."""
    if sys.platform != "linux":
        return free_port()
    while True:
        first = LOWEST + next(_numbers) % (COUNT - run)
        ports = range(first, first + run)
        held = [_claimed(port) for port in ports]
        if all(held) and all(port_is_free(port) for port in ports):
            _held.extend(claim for claim in held if claim)
            return first
        for claim in held:
            if claim:
                claim.close()


def _claimed(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0baton-test-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim
