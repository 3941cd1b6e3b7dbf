"""A file that exists while a worker takes work: probes read it, as a worker has no port."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def forget(file: str) -> None:
    """Remove what a killed process left; "" is no file. Raises OSError."""
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
