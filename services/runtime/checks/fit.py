"""A model's needs beside a device's memory, in words, before its weights are read; and the nearest setting that fits."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.fit import Needs, nearest, needs
from engine.foreign import is_foreign
from services.runtime.checks.finding import Finding

CONTEXTS = 8


def check_needs(config: EngineConfig, total: int, what: str = "", stages: int = 1) -> Finding | None:
    """Compare a configuration, or its first stage, with `total` bytes; None if nothing can be said. `what`: the memory's name."""
    is_on_cpu = config.device == "cpu"
    name = what or ("the memory that is free" if is_on_cpu else "this card")
    try:
        if is_foreign(config):
            return None
        found = needs(config, total=total, stages=stages)
    except Exception:
        return None  # advice alone: an engine says what is wrong, and where
    text = f"{said(found, min(CONTEXTS, config.max_sequences))}; {name} has {gib(total)}"
    room = total - found.weights - found.passes
    if found.whole <= total:
        return Finding("fit", "ok", f"{text}: room for {room // max(1, found.context)} such contexts")
    other = nearest(config, total, stages)
    remedy = "nothing smaller of this model fits: take another one"
    if other is not None:
        remedy = f"{other.flags} fits: {said(other.needs, 1)}"
    fits = "the weights don't fit" if room <= 0 else "not one whole context fits beside the weights"
    return Finding("fit", "fail" if room <= 0 and not is_on_cpu else "warn", f"{text}: {fits}", remedy)


def said(found: Needs, contexts: int) -> str:
    """The needs in words."""
    what = f"{contexts} contexts" if contexts > 1 else "a context"
    passes = f", {gib(found.passes)} for passes" if found.passes else ""
    return f"needs {gib(found.weights)} of weights and {gib(contexts * found.context)} for {what} of {found.tokens:,}{passes}"


def gib(count: float) -> str:
    """Format bytes in GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
