"""Processor cores available to a process."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path


def physical_cores(root: Path = Path("/"), allowed: Collection[int] | None = None) -> int:
    """Return the number of cores this process may use, at least 1: hyperthreads count once, a container's quota limits it.

    `root` and `allowed` (numbers of logical processors) are this machine's by default.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {
        _read(root / f"sys/devices/system/cpu/cpu{number}/topology/core_cpus_list") or str(number) for number in allowed
    }
    quota, _, period = (_read(root / "sys/fs/cgroup/cpu.max") or "max").partition(" ")
    bound = math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else len(cores)
    return max(1, min(len(cores), bound))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
