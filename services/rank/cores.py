"""Processor cores available to a process, and those of a rank where a machine has several memory nodes."""

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


def own_processors(
    rank: int, size: int, root: Path = Path("/"), allowed: Collection[int] | None = None
) -> frozenset[int]:
    """Return the logical processors of a rank's own memory nodes (sockets); none where it may as well run anywhere.

    Ranks have neighbouring nodes: several each, or one with others. Nodes without a processor that is allowed don't count.
    `root` and `allowed` are as of `physical_cores`.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda each: int(each.name[4:]))
    nodes = [found for folder in folders if (found := _listed(_read(folder / "cpulist")) & {*allowed})]
    if size == 1 or len(nodes) < 2 or (len(nodes) % size and size % len(nodes)):
        return frozenset()
    first, end = rank * len(nodes) // size, -(-(rank + 1) * len(nodes) // size)
    return frozenset().union(*nodes[first:end])


def stay_near(rank: int, size: int) -> frozenset[int]:
    """Keep this thread, and those that it starts, on the processors of the rank's nodes; return them, if it has some."""
    if own := own_processors(rank, size):
        os.sched_setaffinity(0, own)
    return own


def listed(processors: Collection[int]) -> str:
    """The numbers as Linux lists them: 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(processors):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _listed(text: str) -> frozenset[int]:
    runs = [run.partition("-") for run in text.split(",") if run]
    return frozenset(number for first, _, last in runs for number in range(int(first), int(last or first) + 1))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
