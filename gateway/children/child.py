"""The parent's side of a child process: started on demand, killed when it is late."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import msgspec

from gateway.children.frames import read_frame, write_frame

ROOT = Path(__file__).parents[2]
INHERITED = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH")  # inherited variables: no keys
Told = TypeVar("Told", bound=msgspec.Struct)


class DiedError(Exception):
    """The child ended, with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the child ended with {code}")
        self.code = code


class Child:
    """One process of `python -m module`, used by one thread at a time."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_there(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start it. Raises OSError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name in INHERITED},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, message: msgspec.Struct, answer: type[Told], longest_s: float) -> Told:
        """Send a message to the started child; return its answer. Raises TimeoutError, or DiedError; the child is gone then."""
        process = self._process
        assert process is not None
        asked, told = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(longest_s, kill)
        timer.start()
        try:
            write_frame(asked, message)
            return msgspec.msgpack.decode(read_frame(told), type=answer)
        except (OSError, msgspec.DecodeError):
            timer.cancel()
            code = self.end()
            if is_late.is_set():
                raise TimeoutError(f"no answer within {longest_s:g} s") from None
            raise DiedError(code) from None
        finally:
            timer.cancel()

    def end(self) -> int:
        """Kill the child, if any. Returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()  # no effect on a dead process
        with contextlib.suppress(OSError):
            process.communicate()
        return process.wait()
