"""Refusals of models by workers, known before any is started.

A child process (`services.worker.judging`) reads each model as its worker does, so that torch stays out of who asks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from common import PREFIX
from services.runtime.commands import service_environment

CHILD_S = 180.0  # torch is slow to import
OWN = {f"{PREFIX}{name}" for name in ("WORKER_ID", "NATS_CREDENTIALS", "REDIS_CREDENTIALS", "READY_FILE")}


def refusals(workers: Sequence[Mapping[str, str]]) -> list[str]:
    """The refusal of each worker, whose settings are variables; "" for one that would start, as far as its model goes.

    A child that gives no answer refuses nothing: each worker says by itself what is wrong.
    """
    alike = [_apart_from_names(one) for one in workers]
    asked = [one for at, one in enumerate(alike) if one not in alike[:at]]
    if not asked:
        return []
    try:
        child = subprocess.run(
            [sys.executable, "-m", "services.worker.judging"],
            input=msgspec.json.encode(asked),
            env=service_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=CHILD_S,
            check=False,
        )
        found = msgspec.json.decode(child.stdout, type=list[str])
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
        found = []
    if len(found) != len(asked):
        return [""] * len(workers)
    return [found[asked.index(one)] for one in alike]


def _apart_from_names(worker: Mapping[str, str]) -> dict[str, str]:
    """The settings of a worker that others like it have, too."""
    return {name: value for name, value in worker.items() if name not in OWN}
