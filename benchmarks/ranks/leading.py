"""Engines that lead further ranks, each a process with a card of its own, or all on one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from engine.parallel.followers import Followers
from engine.parallel.ranks import ONE_RANK, Ranks
from services.rank.devices import ranks_on
from services.runtime.commands import service_environment


@contextmanager
def leading(
    devices: Sequence[int], *, load: str = "stored", size: int = 0, are_stages: bool = False, width: int = 1
) -> Iterator[Ranks]:
    """Start a rank, or a stage, on each of the cards but the first, which is this process's; end them at last.

    Without cards, there are `size` ranks on CPUs. `load`: "stored" weights, or "drawn" ones, which no checkpoint has. `width`:
    the ranks of each stage.
    """
    count = len(devices) or size
    stages = count // width if are_stages else 1
    if count == 1:
        yield ONE_RANK
        return
    command = [sys.executable, "-m", "benchmarks.ranks.follower", str(stages), load, ",".join(map(str, devices))]
    followers = Followers(count, command, environment=service_environment())
    try:
        ranks = ranks_on(followers.group, "cuda" if devices else "cpu", stages=stages)
        yield replace(ranks, followers=followers)
    finally:
        followers.close()
