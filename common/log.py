"""Log lines that several processes write: a server that is away, a library that lacks what is overridden; foreign text."""

from __future__ import annotations

import logging
import time
from importlib.metadata import version


def difference(library: str, lacks: list[str], lost: str) -> dict[str, object]:
    """Fields of a warning: the private parts that `library` lacks, so that its own implementation runs."""
    told: dict[str, object] = {"library": library, "version": version(library), "lacks": lacks, "lost": lost}
    return told | {"remedy": "install the release that constraints.txt names"}


class Outage:
    """Logs once when a server goes away and once when it is back, however many tries there are in between."""

    def __init__(self, log: logging.Logger, server: str) -> None:
        self._log = log
        self._server = server
        self._since = 0.0
        self.tries = 0  # failed tries since the server went away

    def failed(self, error: str) -> None:
        """Record a failed try."""
        self.tries += 1
        if self.tries == 1:
            self._since = time.monotonic()
            self._log.warning(f"{self._server}.away", extra={"error": error})

    def ended(self) -> None:
        """Record a try that succeeded."""
        if self.tries:
            away_s = round(time.monotonic() - self._since, 1)
            self._log.info(f"{self._server}.back", extra={"tries": self.tries, "away_s": away_s})
            self.tries = 0


def printable(value: object) -> str:
    """Escape text for one log line: foreign text can neither break the line nor control a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))
