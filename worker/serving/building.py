"""Waiting for a sequence's grammar outside the passes."""

from __future__ import annotations

import asyncio

from engine.grammars.grammars import Grammars
from engine.sequence import Sequence


async def built(grammars: Grammars, sequence: Sequence) -> None:
    """Return once the sequence's grammar is built or has failed, which its first pass reports; at once without one."""
    building = grammars.prepare(sequence)
    if building is not None:
        await asyncio.wait([asyncio.wrap_future(building)])
