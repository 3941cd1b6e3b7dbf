"""A process of a worker that the first one on its host starts, and ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence

from engine.parallel.pulse import described

END_S = 5.0


class Child:
    """A further rank that the first process of its host started."""

    last_words_s = 0.0

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        ends: Sequence[socket.socket],
        shared: int,
        environment: Mapping[str, str] | None,
    ) -> None:
        passed = *(end.fileno() for end in ends), shared
        self._process = subprocess.Popen(
            [*command, *map(str, (*passed, os.getpid()))],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,  # a terminal's Ctrl-C is for the leader, which drains
        )
        self.pid, self.kill = self._process.pid, self._process.kill
        self.name = f"rank {rank} (pid {self.pid})"

    def ended(self) -> tuple[str, bool]:
        code = self._process.poll()
        return ("", False) if code is None else (f"{self.name} ended with {described(code)}", True)

    @property
    def left_well(self) -> bool:
        """True once it ended as its leader's connections did."""
        return self._process.poll() == 0

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
