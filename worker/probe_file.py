"""The ready file of a worker: it exists while the worker takes work, for probes, since a worker has no port."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def forget(file: str) -> None:
    """Remove the leftover of a killed process; "" is no file. Raises OSError."""
    if file:
        Path(file).unlink(missing_ok=True)


@contextlib.contextmanager
def shown(file: str) -> Iterator[None]:
    """Context manager: keep the file; "" is no file. Raises OSError if it can't be written."""
    if file:
        Path(file).touch()
    try:
        yield
    finally:
        forget(file)
