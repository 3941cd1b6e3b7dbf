"""Calls that arrive in pieces, sent once complete: Ollama's clients get arguments as an object."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gateway.http.problem import Json
from gateway.parsing.parsed import CallDelta, join_calls


class WholeCalls:
    """Joins the pieces of an answer's calls."""

    def __init__(self) -> None:
        self._open: list[CallDelta] = []  # the last one may continue

    def add(self, pieces: Sequence[CallDelta], *, is_over: bool) -> list[Json]:
        """Return the calls completed by this piece: by the next one's start, or by the answer's end."""
        if not (pieces or is_over):
            return []
        join_calls(
            self._open,
            [CallDelta(index=one.index, id=one.id, name=one.name, arguments=one.arguments) for one in pieces],
        )
        done, self._open = (self._open, []) if is_over else (self._open[:-1], self._open[-1:])
        return [told for call in done if (told := _told(call)) is not None]


def _told(call: CallDelta) -> Json | None:
    """A complete call; None if it was cut."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}
