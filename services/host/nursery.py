"""The client of the nursery (`services.nursery`), from which `up` forks its CPU workers.

It imports from the first moment, while servers start, and stays: a worker that dies later is there again in half a second.
Where there is no nursery, or it ended, each is started by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from common import PREFIX
from common.settings import ConfigError
from common.tasks import cancel_all
from services.host.child import describe_exit
from services.nursery.beginning import Beginning, begin
from services.nursery.birth import MAX_BYTES, REFUSED, Birth
from services.runtime.linux import adopt_orphans, leave_orphans

log = logging.getLogger("baton.nursery")

BIRTH_S = 180.0  # the first worker waits for all imports and loading
MAX_PID_CHARS = 20


class Adopted:
    """A child of this process that another one forked, with the parts of `asyncio.subprocess.Process` that are needed."""

    def __init__(self, pid: int) -> None:
        """Needs a running loop. Raises OSError if this process has no such child."""
        self.pid = pid
        self.returncode: int | None = None
        self._handle = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._loop.add_reader(self._handle, self._over)

    def _over(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        code: int = await asyncio.shield(self._ended)
        return code

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # not waited for yet, so its pid can't have been reused
            os.kill(self.pid, number)


class Nursery:
    """The nursery process and the socket to it."""

    def __init__(self, begun: Beginning, *, workers: int) -> None:
        self._workers = workers
        self._begun, self._link = begun, begun.link
        self._asking = asyncio.Lock()
        self._is_open = True

    async def born(self, service: str, variables: Mapping[str, str], log_file: Path) -> Adopted | None:
        """Return a new worker; None if it has to be started directly. Raises ConfigError for a model that it would refuse."""
        birth = Birth(service, dict(variables), str(log_file), has_twins=self._workers > 1)
        async with self._asking:
            if not self._is_open:
                return None
            loop = asyncio.get_running_loop()
            adopt_orphans()
            try:
                async with asyncio.timeout(BIRTH_S):
                    await loop.sock_sendall(self._link, msgspec.json.encode(birth))
                    said = await loop.sock_recv(self._link, MAX_BYTES)
                    if said.startswith(REFUSED):
                        why = said.removeprefix(REFUSED).decode(errors="replace")
                        raise ConfigError(f"--model {variables.get(f'{PREFIX}MODEL', '')}: {why}")
                    if said:
                        adopted = _adopted(int(said))
                        return adopted if await self._has_begun(adopted) else None
            except OSError as error:  # includes timeouts
                log.debug("nursery.failed", extra={"error": repr(error)})
            finally:
                leave_orphans()
            self.close()
            return None

    async def _has_begun(self, adopted: Adopted) -> bool:
        """Return True once the new process reports its pid, too; it may die before, as when memory is short."""
        telling = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._link, MAX_PID_CHARS))
        ending = asyncio.ensure_future(adopted.wait())
        has_begun = False
        try:
            await asyncio.wait([telling, ending], return_when=asyncio.FIRST_COMPLETED)
            has_begun = telling.done() and bool(telling.result())
        finally:
            await cancel_all([telling, ending])
            if not has_begun:
                adopted.kill()
        if not has_begun:
            log.warning("nursery.worker_died", extra={"ended": describe_exit(await adopted.wait())})
            with contextlib.suppress(BlockingIOError):  # a leftover report is no answer for the next worker
                self._link.recv(MAX_PID_CHARS)
        return has_begun

    def close(self) -> None:
        """Stop the nursery; workers stay, except one that was not reported yet."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RD)  # a worker that reports its pid after this fails
                if pid := int(self._link.recv(MAX_PID_CHARS) or 0):
                    _end(pid)
            self._begun.end()


def _adopted(pid: int) -> Adopted:
    """Adopt a forked worker. Raises OSError without leaving an unwatched process."""
    try:
        return Adopted(pid)
    except OSError:
        _end(pid)
        raise


def _end(pid: int) -> None:
    """Kill a child that nobody waits for."""
    with contextlib.suppress(OSError):  # not a child
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def open_nursery(workers: int, begun: Beginning | None = None) -> Nursery | None:
    """A nursery for so many workers of each model, `begun` or started here; None if the system can't have one."""
    begun = begun or begin()
    return None if begun is None else Nursery(begun, workers=workers)
