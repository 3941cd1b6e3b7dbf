"""The placement constants of `policy.toml`: one file for Lua, the gateway, the planner and the simulation."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("policy.toml")


@functools.cache
def placement_policy() -> Mapping[str, Mapping[str, float]]:
    """Return section -> name -> value."""
    return tomllib.loads(FILE.read_text())


def kv_read_bytes_per_s() -> float:
    """The memory bandwidth assumed for a decode step that reads its context."""
    return float(placement_policy()["decode"]["kv_read_bytes_per_s"])
