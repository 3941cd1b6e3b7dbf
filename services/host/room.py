"""The memory of a host's machine."""

from __future__ import annotations

import math

from services.runtime.checks.memory import available_bytes


def free_bytes() -> float:
    """Host memory that is free now; infinite where the system doesn't tell."""
    found = available_bytes()
    return math.inf if found is None else found


def too_large(needed: int, free: float) -> str:
    """The reason that a model is not loaded, and the remedy."""
    gib = f"needs {needed / (1 << 30):.1f} GiB of memory, and {free / (1 << 30):.1f} are free"
    return f"{gib}: unload another model, or start with a smaller --kv-memory-mb or --quantization"
