"""Waiting for a sequence's grammar, so that no pass waits for it."""

from __future__ import annotations

import asyncio

from engine.grammars.grammars import Grammars
from engine.sequence import Sequence


async def built(grammars: Grammars, sequence: Sequence) -> None:
    """Return when the sequence's grammar is built or can't be, which its first pass tells; at once without one."""
    building = grammars.prepare(sequence)
    if building is not None:
        await asyncio.wait([asyncio.wrap_future(building)])
