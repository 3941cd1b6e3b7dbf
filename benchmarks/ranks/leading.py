"""Engines that lead further ranks, each a process with a card of its own, or all on one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.parallel.followers import Followers
from engine.parallel.ranks import ONE_RANK, Ranks
from services.rank.devices import group_on
from services.runtime.commands import service_environment


@contextmanager
def leading(devices: Sequence[int], *, load: str = "stored", size: int = 0) -> Iterator[Ranks]:
    """Start a rank on each of the cards but the first, which is this process's; end them at last.

    Without cards, there are `size` ranks on CPUs. `load`: "stored" weights, or "drawn" ones, which no checkpoint has.
    """
    count = len(devices) or size
    if count == 1:
        yield ONE_RANK
        return
    command = [sys.executable, "-m", "benchmarks.ranks.follower", load, ",".join(map(str, devices))]
    followers = Followers(count, command, environment=service_environment())
    try:
        yield Ranks(group_on(followers.group, "cuda" if devices else "cpu"), followers)
    finally:
        followers.close()
