"""One service process of `baton up`: started, watched, stopped, with its log in a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from services.runtime.commands import service_environment
from services.runtime.linux import die_with_parent
from services.runtime.servers import Process, stop

SAID = "baton: "  # the prefix of `services.runtime.loading.fail`
MAX_ERROR_LINES = 40
MAX_ERROR_CHARS = 1000
MAX_TAIL_BYTES = 64 << 10  # logs grow for weeks, and this is read on an event loop
Bear = Callable[[str, Mapping[str, str], Path], Awaitable[Process | None]]


class Child:
    """A service process and its log file. It gets its settings as variables, and dies with this process."""

    def __init__(
        self,
        *,
        name: str,
        service: str,
        settings: Mapping[str, str],
        log_file: Path,
        bear: Bear | None = None,
    ) -> None:
        """`bear`: the quicker way to start it, if available."""
        self.name = name
        self.service = service
        self.log_file = log_file
        self._settings = settings
        self._bear = bear
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start the process; append to an earlier log of this name."""
        if self._bear is not None:
            self._process = await self._bear(self.service, self._settings, self.log_file)
        if self._bear is None or self._process is None:
            self._bear = None
            self._process = await self._started_by_itself()

    async def _started_by_itself(self) -> Process:
        with self.log_file.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"services.{self.service}",
                env=service_environment() | dict(self._settings),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                start_new_session=True,  # Ctrl-C reaches `baton up` alone, which stops its children in order
            )

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, *, timeout_s: float) -> None:
        """Let it drain; kill it after `timeout_s`."""
        if self._process is not None:
            await stop(self._process, timeout_s=timeout_s)


def describe_exit(code: int) -> str:
    """Describe a process's exit: `exit code 2`, `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def last_lines(log_file: Path, count: int) -> list[str]:
    """The end of a log, of its last `MAX_TAIL_BYTES`; empty if there is none."""
    with contextlib.suppress(OSError), log_file.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
        return log.read(MAX_TAIL_BYTES).decode(errors="replace").splitlines()[-count:]
    return []


def why_ended(log_file: Path) -> str:
    """The last words of an exited process, on one line: its error, or the last line of its log; "" if there is none."""
    lines = last_lines(log_file, MAX_ERROR_LINES)
    said = [at for at, line in enumerate(lines) if line.startswith(SAID) and not line.startswith(f"{SAID}warning")]
    error = lines[said[-1] :] if said else lines[-1:]
    return " ".join(" ".join(error).removeprefix(SAID).split())[:MAX_ERROR_CHARS]
