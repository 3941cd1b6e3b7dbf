"""A child process that checks grammars, from the gateway's side: started when it is needed, replaced when it dies or is late."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from gateway.grammars.child import Opening, Question, Verdict, read_frame, write_frame
from gateway.grammars.wanted import Form

log = logging.getLogger("baton.grammars")

# By the clock, for a busy machine or a child that stands still. The child bounds its processor time itself.
LONGEST_CHECK_S = 15.0
LONGEST_START_S = 60.0
INHERITED = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH")  # variables: no keys
ROOT = Path(__file__).parents[2]
# The library runs out of memory or stack, and the system ends the child: the grammar's doing. No other death is.
_TOO_LARGE = (-signal.SIGABRT, -signal.SIGSEGV)


class NotCheckedError(Exception):
    """The child died, was late or could not start, which says nothing of the grammar."""


class _DiedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"the child ended with {code}")
        self.code = code


class Checker:
    """One child, which lives from the first grammar on. For one thread at a time."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._child: subprocess.Popen[bytes] | None = None

    def verdict(self, form: Form) -> Verdict:
        """Raises NotCheckedError."""
        try:
            if self._child is not None:
                with contextlib.suppress(_DiedError):  # perhaps of the grammars before this one
                    return self._asked(form)
            return self._start() or self._asked(form)
        except _DiedError as died:
            if died.code in _TOO_LARGE:
                return Verdict(problem="takes too much memory to build: make it simpler", is_lasting=False)
            why = str(died)
        except (OSError, TimeoutError) as error:
            self.end()
            why = f"{type(error).__name__}: {error}"
        log.warning("grammars.not_checked", extra={"reason": why})
        raise NotCheckedError(why)

    def end(self) -> int:
        """Kill the child, if there is one. Returns how it ended."""
        child, self._child = self._child, None
        if child is None:
            return 0
        child.kill()  # a dead one keeps its own end
        with contextlib.suppress(OSError):
            child.communicate()
        return child.wait()

    def _start(self) -> Verdict | None:
        """Start the child. Returns what is wrong with the tokenizer, if anything is."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "gateway.grammars.child"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name in INHERITED},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        verdict = self._ask(self._opening, LONGEST_START_S)
        if not verdict.problem:
            return None
        self.end()
        return verdict

    def _asked(self, form: Form) -> Verdict:
        """Raises as `_ask`."""
        try:
            return self._ask(Question(form), LONGEST_CHECK_S)
        except _DiedError as died:
            if died.code != -signal.SIGPROF:
                raise
            why = f"takes more than {self._opening.cpu_s:g} s to build: make it simpler"
            return Verdict(problem=why, is_lasting=False)

    def _ask(self, message: Opening | Question, longest_s: float) -> Verdict:
        """Raises TimeoutError, or _DiedError when the child did."""
        child = self._child
        assert child is not None
        asked, told = cast(BinaryIO, child.stdin), cast(BinaryIO, child.stdout)
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(longest_s, kill)
        timer.start()
        try:
            write_frame(asked, message)
            return msgspec.msgpack.decode(read_frame(told), type=Verdict)
        except (OSError, msgspec.DecodeError):
            timer.cancel()
            code = self.end()
            if is_late.is_set():
                raise TimeoutError(f"no answer within {longest_s:g} s") from None
            raise _DiedError(code) from None
        finally:
            timer.cancel()
