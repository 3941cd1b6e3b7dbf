"""Fetches one model, and writes each step as a line of JSON: `status`, `completed` and `total` bytes, or `error`, `missing`.

The process is apart from the gateway, so that neither hashes nor bytes delay a token, and ends with it.
"""

from __future__ import annotations

import json
import sys
import time

from common.settings import ConfigError
from services.runtime.models.named import by_name
from services.runtime.models.store import MissingError

TELL_EACH_S = 0.25


class _Lines:
    """Steps on standard output."""

    def __init__(self) -> None:
        self._told_at = 0.0

    def __call__(self, line: str) -> None:
        _tell(status=line)

    def counts(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._told_at >= TELL_EACH_S:
            self._told_at = now
            _tell(status=f"pulling {what}", digest=what, total=total, completed=done)


def _tell(**step: str | int) -> None:
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Entry point; returns the exit code."""
    (name,) = sys.argv[1:]
    try:
        _tell(status="pulling manifest")
        by_name(name, _Lines(), newest=True)
    except ConfigError as error:
        _tell(error=str(error), missing=isinstance(error, MissingError))
        return 1
    _tell(status="success")
    return 0


if __name__ == "__main__":
    sys.exit(main())
