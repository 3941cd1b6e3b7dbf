"""The process of a nursery, and the socket to it. Imports little: nothing that takes long comes before its own imports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from services.runtime.commands import HELP, service_environment
from services.runtime.linux import adopt_orphans, die_with_parent, leave_orphans

GPUS = Path("/dev/nvidiactl")


class Beginning:
    """A nursery that imports, or has done so."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, said: int) -> None:
        """`said`: a file descriptor of what it prints."""
        self._process, self.link, self._said = process, link, said
        self._is_open = True

    def end(self) -> None:
        """Kill it; its children stay."""
        if self._is_open:
            self._is_open = False
            self.link.close()
            self._process.kill()
            self._process.wait()
            os.close(self._said)


def begin() -> Beginning | None:
    """Start a nursery; None if the system can't have one."""
    if not _has_pidfds() or not adopt_orphans():
        return None
    leave_orphans()  # until the next fork
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.setblocking(False)
    said = os.memfd_create("nursery")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.nursery"],
            env=service_environment() | {"OPENBLAS_NUM_THREADS": "1"},  # its threads would start with numpy's import
            stdin=theirs.fileno(),
            stdout=said,
            stderr=said,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
    return Beginning(process, link, said)


def begin_ahead(arguments: list[str]) -> Beginning | None:
    """Start a nursery for `baton up` before its options are read, which takes half a second; None where it is no likely use."""
    return None if set(arguments) & set(HELP) or GPUS.exists() else begin()


def _has_pidfds() -> bool:
    """True if pidfds work: Python may have the call, and the kernel or a sandbox refuse it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
