"""`baton up` as benchmarks start it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.01
STOP_S = 60.0


@contextmanager
def serving(
    command: Sequence[str], *, cwd: Path, log: Path, ready_s: float, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run `command` from when it says that it serves until it has stopped; yields its pid. Raises RuntimeError with its log."""
    began = time.perf_counter()
    with log.open("wb") as output:
        up = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=output)
    try:
        while "Baton serves" not in log.read_text(errors="replace"):
            if up.poll() is not None or time.perf_counter() - began > ready_s:
                raise RuntimeError(log.read_text(errors="replace"))
            time.sleep(POLL_S)
        yield up.pid
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(STOP_S)
