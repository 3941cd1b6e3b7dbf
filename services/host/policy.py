"""The choice of models to load, to put to sleep and to unload: a pure function of wishes, states, memory and time.

A model is wanted while any gateway's wish for it lasts. Where more are wanted than may be loaded at once, idle ones give way
first, the least recently active before others. One with requests gives way only to a model whose requests have waited for
`PATIENCE_S`, and after a turn as long; its requests wait at their gateways then, and go on where they were.

A model that can sleep does so where another one would be unloaded. It takes no place then, but memory: where another one that is
to be loaded lacks some, those that sleep are unloaded, the one that sleeps longest before others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.words import HostStatus

PATIENCE_S = 60.0
RETRY_S = 10.0  # until a failed model is tried again
TAKES_PLACE = (HostStatus.LOADING, HostStatus.READY, HostStatus.UNLOADING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model now. Instants are of one clock."""

    status: HostStatus
    since: float  # start of the status
    wanted_until: float = -math.inf
    wanted_since: float = math.inf  # by the wishes that last
    active: bool = False  # requests wait for it, or run
    active_at: float = -math.inf  # the last time
    parks_s: float = 0.0  # how long it sleeps before it is unloaded; 0: it doesn't sleep
    needs_bytes: int = 0  # to be loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The models to load (or to wake), to put to sleep and to unload now."""

    load: tuple[str, ...] = ()
    park: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()


def decide(
    now: float, models: Mapping[str, ModelView], max_loaded: int, *, free_bytes: Callable[[], float] = lambda: math.inf
) -> Steps:
    """Choose the next steps. `max_loaded` 0: no limit. `free_bytes()`: of host memory."""
    leaves = [name for name, model in models.items() if model.status is HostStatus.READY and model.wanted_until <= now]
    places = (max_loaded or len(models)) - sum(model.status in TAKES_PLACE for model in models.values())
    leaving = len(leaves) + sum(model.status is HostStatus.UNLOADING for model in models.values())
    load: list[str] = []
    for name in sorted(_waiting(now, models), key=lambda name: models[name].wanted_since):
        if places > 0:
            places -= 1
            load.append(name)
        elif leaving > 0:
            leaving -= 1  # its place is about to be free
        elif (victim := _victim(now, models, models[name], leaves)) is not None:
            leaves.append(victim)
    load, slept = _give_way(now, models, load, free_bytes)
    sleepy = [name for name in leaves if models[name].parks_s > 0]
    unload = [name for name in leaves if name not in sleepy] + slept
    return Steps(load=tuple(load), park=tuple(sleepy), unload=tuple(unload))


def _give_way(
    now: float, models: Mapping[str, ModelView], load: Sequence[str], free_bytes: Callable[[], float]
) -> tuple[list[str], list[str]]:
    """Those of `load` that needn't wait for memory; those that have slept long enough, or whose memory is needed."""
    sleepers = [name for name, model in models.items() if model.status is HostStatus.PARKED and name not in load]
    over = [name for name in sleepers if models[name].wanted_until <= now >= models[name].since + models[name].parks_s]
    short = [name for name in load if _lacks_memory(models[name], free_bytes)]
    if short and not over and sleepers:
        over = [min(sleepers, key=lambda name: models[name].since)]
    is_freed = bool(over) or any(model.status is HostStatus.UNLOADING for model in models.values())
    return [name for name in load if not is_freed or name not in short], over


def _lacks_memory(model: ModelView, free_bytes: Callable[[], float]) -> bool:
    """True if a model that has nothing in memory yet would not fit there now."""
    return model.status is not HostStatus.PARKED and model.needs_bytes > 0 and model.needs_bytes > free_bytes()


def _waiting(now: float, models: Mapping[str, ModelView]) -> list[str]:
    """The models that should be loaded and aren't."""
    return [
        name
        for name, model in models.items()
        if model.wanted_until > now
        and (
            model.status in (HostStatus.UNLOADED, HostStatus.PARKED)
            or (model.status is HostStatus.FAILED and now - model.since >= RETRY_S)
        )
    ]


def _victim(now: float, models: Mapping[str, ModelView], for_: ModelView, leaving: list[str]) -> str | None:
    """The model that gives way to one that is wanted; None: nobody yet."""
    if not for_.active:
        return None  # an earlier request's wish alone drives nobody out
    ready = {name: model for name, model in models.items() if model.status is HostStatus.READY and name not in leaving}
    idle = [name for name, model in ready.items() if not model.active]
    if idle:
        return min(idle, key=lambda name: ready[name].active_at)
    had_their_turn = [name for name, model in ready.items() if now - model.since >= PATIENCE_S]
    if had_their_turn and now - for_.wanted_since >= PATIENCE_S:
        return min(had_their_turn, key=lambda name: ready[name].since)
    return None
