"""Processes that begin with their modules loaded: two thirds of a worker's processor time at its start is `import torch`.

A process of the test run loads them once and forks for each start; from there on a child is what `python -m` makes: main module,
arguments, environment, folder, files, exit code. Fresh interpreters are what `tests/e2e/test_up.py`, `test_chart.py` and
`test_wheel.py` start.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from services.runtime.linux import die_with_parent
from services.runtime.memory import importing

ROOT = Path(__file__).resolve().parents[1]
LONGEST_ORDER = 1 << 17  # bytes: the environment is in it


class Process:
    """What `asyncio.subprocess.Process` is to those who start and end one."""

    def __init__(self, pid: int, life: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._writer = writer
        self._ended = asyncio.create_task(self._end(life))

    async def wait(self) -> int:
        """The exit code; of one that a signal ended, its number below 0."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, which is not told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def _end(self, life: asyncio.StreamReader) -> int:
        word = await life.readline()
        self._writer.close()
        self.returncode = int(word or -signal.SIGKILL)  # without a word its parent is gone, and it with it
        return self.returncode


async def start(
    module: str,
    arguments: Sequence[str],
    *,
    loads: Sequence[str],
    env: Mapping[str, str],
    files: Sequence[int],
    leaves_at_once: bool = False,
) -> Process:
    """As `python -m module` in the repository's root. `files`: its standard output and errors, and what it reads.

    `loads`: what is loaded before; who asks for the same shares a parent. `leaves_at_once`: see there.
    """
    mine, its = socket.socketpair()
    order = json.dumps(
        {"module": module, "arguments": list(arguments), "env": dict(env), "leaves_at_once": leaves_at_once}
    ).encode()
    assert len(order) <= LONGEST_ORDER
    with its:
        socket.send_fds(_parent_of(tuple(loads)).orders, [order], [its.fileno(), *files])
    life, writer = await asyncio.open_connection(sock=mine)
    if not (pid := await life.readline()):
        raise RuntimeError(f"nothing forks for {module}: see the standard errors of this run")
    return Process(int(pid), life, writer)


@dataclass(frozen=True)
class Parent:
    """Who forks. It ends with this process."""

    process: subprocess.Popen[bytes]
    orders: socket.socket

    def end(self) -> None:
        self.orders.close()
        self.process.wait()


@functools.cache
def _parent_of(loads: tuple[str, ...]) -> Parent:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST_ORDER)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", str(its.fileno()), *loads],
            pass_fds=[its.fileno()],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    parent = Parent(process, mine)
    atexit.register(parent.end)
    return parent


# -- the parent --------------------------------------------------------------------------------------------------------


class Children:
    """Those that were forked, each with whom to tell of its end."""

    def __init__(self) -> None:
        self._lives: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells of the end
        self.selector = selectors.DefaultSelector()

    def add(self, pid: int, life: socket.socket) -> None:
        ends = os.pidfd_open(pid)
        self._lives[ends] = pid, life
        self.selector.register(ends, selectors.EVENT_READ)
        tell(life, pid)

    def ended(self, ends: int) -> None:
        self.selector.unregister(ends)
        os.close(ends)
        pid, life = self._lives.pop(ends)
        tell(life, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        life.close()

    def forget(self) -> None:
        """In a child: these are its parent's."""
        self.selector.close()
        for ends, (_, life) in self._lives.items():
            os.close(ends)
            life.close()


def tell(life: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        life.sendall(f"{number}\n".encode())


def serve(orders: socket.socket) -> dict[str, Any]:
    """Fork for each order; returns in the child, with it. Ends when there is nobody who gives them."""
    children = Children()
    children.selector.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in children.selector.select():
            if key.fileobj is not orders:
                children.ended(key.fd)
                continue
            order, (*got,), _, _ = socket.recv_fds(orders, LONGEST_ORDER, 4)
            if not order:
                sys.exit()
            life, files = socket.socket(fileno=got[0]), got[1:]
            pid = os.fork()
            if not pid:
                for own in (children.forget, orders.close, life.close):
                    own()
                die_with_parent()
                for number, file in zip((1, 2, 0), files, strict=False):
                    os.dup2(file, number)
            for file in files:
                os.close(file)
            if not pid:
                return dict(json.loads(order))
            children.add(pid, life)


def main(file: str, *loads: str) -> None:
    die_with_parent()
    with importing():
        for name in loads:
            importlib.import_module(name)
    order = serve(socket.socket(fileno=int(file)))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv[1:] = order["arguments"]
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except SystemExit as left:
        if order["leaves_at_once"] and isinstance(left.code, int):
            leave_at_once(left.code)
        raise


def leave_at_once(code: int) -> NoReturn:
    """End as `sys.exit` does, but without freeing what is loaded: writing all of its pages is most of a child's time."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
