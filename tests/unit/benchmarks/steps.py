"""Steps of `benchmarks.on_a_gpu`, run in this process."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


def run(module: str, arguments: Sequence[str]) -> int:
    """Call `main` of what `python -m module` runs: itself, or a folder's `__main__`."""
    found: Any = importlib.import_module(module)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    return int(found.main(arguments))
