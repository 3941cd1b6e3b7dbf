"""Making grammars for one model: a child process builds each of them first, with bounds on time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from common.errors import InvalidRequestError, OverloadedError
from common.messages import Grammar
from gateway.grammars.child import Opening, Question, Verdict, read_frame, write_frame
from gateway.grammars.wanted import Form, Wanted

MOST_WAITING = 32  # grammars that wait for their check; more are refused
LONGEST_CHECK_S = 5.0
LONGEST_START_S = 60.0
KEPT = 256  # verdicts
ROOT = Path(__file__).parents[2]


class GrammarMaker:
    """Starts its child with the first grammar. Any number of tasks may ask."""

    def __init__(self, tokenizer: str, *, vocab_size: int, eos_ids: Sequence[int], specials: Sequence[str]) -> None:
        """`tokenizer`: a tokenizer.json's text; `specials`: the texts of its special tokens."""
        self._opening = Opening(tokenizer, vocab_size, list(eos_ids), list(specials))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._child: subprocess.Popen[bytes] | None = None  # only its thread touches it
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._num_waiting = 0

    async def make(self, wanted: Wanted) -> Grammar:
        """Raises InvalidRequestError with the library's words, or OverloadedError."""
        try:
            key = msgspec.msgpack.encode(wanted.form)
        except (OverflowError, RecursionError, UnicodeEncodeError):
            raise _refused(wanted, "has a number, a depth or half a character that no grammar has") from None
        verdict = self._verdicts.get(key)
        if verdict is None:
            if self._num_waiting >= MOST_WAITING:
                raise OverloadedError("too many grammars wait for their check")
            self._num_waiting += 1
            try:
                verdict = await asyncio.get_running_loop().run_in_executor(self._thread, self._judged, wanted.form)
            finally:
                self._num_waiting -= 1
            self._verdicts[key] = verdict
            while len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        if verdict.problem:
            raise _refused(wanted, verdict.problem)
        after = None if wanted.after is None else list(wanted.after)
        return Grammar(text=verdict.text, after=after, budget=wanted.budget)

    def close(self) -> None:
        """End the child once what was asked is answered."""
        self._thread.submit(self._end)
        self._thread.shutdown(wait=True)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _judged(self, form: Form) -> Verdict:
        """Ask the child; a fresh one if this one dies of it, since it may have died of those before."""
        for _ in range(2):
            was_fresh = self._child is None
            try:
                problem = self._start()
                if problem:
                    return Verdict(problem=problem)
                return self._ask(Question(form), LONGEST_CHECK_S)
            except TimeoutError:
                self._end()
                return Verdict(problem=f"takes more than {LONGEST_CHECK_S:.0f} s to build: make it simpler")
            except (OSError, msgspec.DecodeError):
                self._end()
                if was_fresh:
                    break
        return Verdict(problem="takes too much memory to build: make it simpler")

    def _start(self) -> str:
        """Start the child if there is none. Returns what is wrong with the tokenizer."""
        if self._child is not None:
            return ""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "gateway.grammars.child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        problem = self._ask(self._opening, LONGEST_START_S).problem
        if problem:
            self._end()
        return problem

    def _ask(self, message: Opening | Question, longest_s: float) -> Verdict:
        """Raises TimeoutError, or OSError or DecodeError when the child died."""
        child = self._child
        assert child is not None
        asked, told = cast(BinaryIO, child.stdin), cast(BinaryIO, child.stdout)
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(longest_s, end)
        timer.start()
        try:
            write_frame(asked, message)
            return msgspec.msgpack.decode(read_frame(told), type=Verdict)
        except (OSError, msgspec.DecodeError):
            if is_late.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(OSError):
                child.communicate()


def _refused(wanted: Wanted, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{wanted.field}: {why}", param=wanted.field.partition(".")[0])
