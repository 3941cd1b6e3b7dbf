"""Concurrent changes of a stored record by several gateways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.errors import UnavailableError

CHANGE_TRIES = 20
Record = TypeVar("Record")


async def changed(
    what: str,
    load: Callable[[], Awaitable[tuple[Record, int]]],
    to: Callable[[Record], Record],
    write: Callable[[Record, int], Awaitable[int]],
) -> Record:
    """Apply `to` to the newest record, retrying on conflicts, and return the result; an unchanged one is not written.

    `load` gives the record and its sequence, `write` takes both and returns 0 where the sequence has moved on. Raises what these
    and `to` raise, UnavailableError about `what`.
    """
    for _ in range(CHANGE_TRIES):
        record, seq = await load()
        new = to(record)
        if new == record or await write(new, seq):
            return new
    raise UnavailableError(f"{what} is changed all the time: try again")
