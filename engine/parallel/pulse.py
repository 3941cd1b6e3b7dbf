"""Signs of life: a thread of each further rank counts up, and the leader sees that the count stands still.

A rank that computes, loads or waits for a lock for long goes on counting. One that is stopped, or whose machine has taken its
processor away, does not, and no pass ends without it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable

BEAT_S = 0.5
STANDS_S = 10.0  # as long as GPUs poll for one another
LOADING_S = 60.0  # a library that is imported or compiled may keep all threads waiting
MOST_OF_A_LOOK_S = 1.0


def beat(count: Callable[[], object]) -> None:
    """Call `count()` at each beat, from a thread, as long as this process lives."""

    def beating() -> None:
        while True:
            count()
            time.sleep(BEAT_S)

    threading.Thread(target=beating, name="pulse", daemon=True).start()


class Pulse:
    """A rank's count as its leader sees it, from any thread."""

    def __init__(self, count: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._clock = count, clock
        self._seen, self._still_s, self._looked_at = 0, 0.0, clock()
        self._looking = threading.Lock()

    def still_s(self) -> float:
        """Look; return for how long the count stands still, 0 before it began.

        Between two looks passes a second at most: a leader that stood still itself blames nobody.
        """
        with self._looking:
            count, now = self._count(), self._clock()
            since, self._looked_at = min(MOST_OF_A_LOOK_S, now - self._looked_at), now
            self._still_s = self._still_s + since if count == self._seen and count else 0.0
            self._seen = count
            return self._still_s


def described(code: int) -> str:
    """Return how a process ended, by its exit code; a negative one is a signal's."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
