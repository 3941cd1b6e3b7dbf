"""The choice among hosts that offer the same model: a pure function of what each says, the same at all of them.

A host leaves a model to another one that has it, or is loading it. Otherwise it is loaded where it sleeps, else where most room
is: a free place, then free GPUs, then free memory, by whole GiB. Nobody is asked and nobody answers: who dies is missed within
`SILENT_S`, and the next one loads. Where two load at once, because neither had heard the other, both serve until they are idle.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.messages import HostState
from common.words import HostStatus

SILENT_S = 2.5
HAVE = (HostStatus.LOADING, HostStatus.READY)


def leaves_to(model: str, own: HostState, others: Iterable[HostState]) -> str:
    """The host to which this one leaves a model that is wanted; "": it loads it itself. `own`: as it was last told."""
    offers = [state for state in others if state.shares and model in state.models]
    if has := next((state.host for state in offers if state.models[model].status in HAVE), ""):
        return has
    able = [state for state in (own, *offers) if state.models[model].status is not HostStatus.FAILED]
    best = max(able, key=lambda state: (*_room(state, model), state.host), default=own)
    return "" if best.host == own.host else best.host


def _room(state: HostState, model: str) -> tuple[bool, bool, int, int]:
    sleeps_here = state.models[model].status is HostStatus.PARKED
    return sleeps_here, state.free_places > 0, state.free_cards, state.free_bytes >> 30
