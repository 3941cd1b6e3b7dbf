"""Refusals of models by workers of several ranks or stages, known before any is started.

A child process (`services.worker.judging`) reads each model as its worker does, so that torch stays out of who asks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from services.runtime.commands import service_environment

CHILD_S = 180.0  # torch is slow to import


def refusals(workers: Sequence[Mapping[str, str]]) -> list[str]:
    """The refusal of each worker, whose settings are variables; "" for one that would start, as far as its model goes.

    A child that gives no answer refuses nothing: each worker says by itself what is wrong.
    """
    if not workers:
        return []
    try:
        child = subprocess.run(
            [sys.executable, "-m", "services.worker.judging"],
            input=msgspec.json.encode(workers),
            env=service_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=CHILD_S,
            check=False,
        )
        found = msgspec.json.decode(child.stdout, type=list[str])
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
        found = []
    return found if len(found) == len(workers) else [""] * len(workers)
