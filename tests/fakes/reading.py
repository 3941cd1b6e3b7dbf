"""A reader of one generation, without an answer around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gateway.request.spec import Generation, TokenEvent

EVERYTHING = 1 << 30


async def events_of(generation: Generation) -> AsyncIterator[TokenEvent]:
    """Its tokens as they come, until the last. Raises ServingError."""
    arrived = asyncio.Event()
    generation.mailbox.listen(arrived.set)
    while not generation.mailbox.is_over:
        await arrived.wait()
        arrived.clear()
        event = generation.mailbox.take(EVERYTHING)
        if event is not None:
            yield event
            if event.finish:
                return
            if generation.mailbox.has_more:  # what came before this reader listened
                arrived.set()
