"""Whether a worker takes work, for those who can only look at files: a worker has no port, and probes ask in its container."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def forget(file: str) -> None:
    """Remove what a process left that was killed; "" is no file. Raises OSError."""
    if file:
        Path(file).unlink(missing_ok=True)


@contextlib.contextmanager
def shown(file: str) -> Iterator[None]:
    """Keep the file while the block runs; "" is no file. Raises OSError when it can't be written."""
    if file:
        Path(file).touch()
    try:
        yield
    finally:
        forget(file)
