"""The parent's side of a child process that checks grammars: started on demand, replaced when it dies or is late."""

from __future__ import annotations

import contextlib
import logging
import signal

from gateway.children.child import Child, DiedError
from gateway.grammars.child import Opening, Question, Verdict
from gateway.grammars.wanted import Form

log = logging.getLogger("baton.grammars")

# Wall-clock seconds for a hanging child, generous for a busy machine. The child limits its processor time itself.
LONGEST_CHECK_S = 15.0
LONGEST_START_S = 60.0
# The library ran out of memory or stack, and the system killed the child: the grammar's fault. No other death is.
_TOO_LARGE = (-signal.SIGABRT, -signal.SIGSEGV)


class NotCheckedError(Exception):
    """The child died, was late or could not start, which proves nothing about the grammar."""


class Checker:
    """One child, which lives from the first grammar on. Used by one thread at a time."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._child = Child("gateway.grammars.child")

    def verdict(self, form: Form) -> Verdict:
        """Raises NotCheckedError."""
        try:
            if self._child.is_there:
                with contextlib.suppress(DiedError):  # possibly because of earlier grammars
                    return self._asked(form)
            return self._start() or self._asked(form)
        except DiedError as died:
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
        return self._child.end()

    def _start(self) -> Verdict | None:
        """Start the child. Returns the tokenizer's fault, if any."""
        self._child.start()
        verdict = self._child.ask(self._opening, Verdict, LONGEST_START_S)
        if not verdict.problem:
            return None
        self.end()
        return verdict

    def _asked(self, form: Form) -> Verdict:
        """Ask the child. Raises as `Child.ask`."""
        try:
            return self._child.ask(Question(form), Verdict, LONGEST_CHECK_S)
        except DiedError as died:
            if died.code != -signal.SIGPROF:
                raise
            why = f"takes more than {self._opening.cpu_s:g} s to build: make it simpler"
            return Verdict(problem=why, is_lasting=False)
