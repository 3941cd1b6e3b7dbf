"""A download's progress: a bar on a terminal, else a line for each tenth."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from services.runtime.checks.model import gigabytes

Say = Callable[[str], None]


@runtime_checkable
class Counter(Protocol):
    """A `Say` that is also told the bytes whenever they change."""

    def __call__(self, line: str) -> None:
        """Take a line."""
        ...

    def counts(self, what: str, done: int, total: int) -> None:
        """Take bytes, from any thread."""
        ...


class Progress:
    """Counts bytes, from any thread."""

    def __init__(self, what: str, total: int, say: Say) -> None:
        self._what, self._total, self._say = what, total, say
        self._done = self._told = 0
        self._lock = threading.Lock()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and not isinstance(self._say, Counter):
            from tqdm import tqdm

            self._bar = tqdm(desc=self._what, total=self._total, unit="B", unit_scale=True, leave=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int) -> None:
        """So many bytes came; less than 0: so many are fetched again."""
        with self._lock:
            self._done += count
            if isinstance(self._say, Counter):
                self._say.counts(self._what, self._done, self._total)
                return
            if self._bar is not None:
                self._bar.update(count)
                return
            tenth = 10 * self._done // max(1, self._total)
            if 0 < tenth < 10 and tenth > self._told:
                self._told = tenth
                self._say(f"{self._what}: {10 * tenth} %, {gigabytes(self._done)} of {gigabytes(self._total)}")
