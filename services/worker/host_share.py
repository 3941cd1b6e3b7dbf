"""The memory of the host tier where `--kv-host-mb auto` leaves it open."""

from __future__ import annotations

# Share of the memory that is free at the start. The rest is for weights, file caches and others.
HOST_SHARE = 0.5


def host_mb(asked: int, *, num_workers: int = 1, free_bytes: int | None = None) -> int:
    """The MiB of each of so many workers: those asked for or, below 0, a part of a share of the free memory."""
    if asked >= 0:
        return asked
    if free_bytes is None:
        from services.runtime.checks.memory import available_bytes  # it knows models' weights, too

        free_bytes = available_bytes() or 0
    return int(HOST_SHARE * free_bytes / num_workers) >> 20
