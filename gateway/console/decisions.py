"""Planners' decisions as gateways hear them: each planner's newest state, and changes of decision."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from common.messages import PlannerState

MAX_DECISIONS = 100
MAX_PLANNERS = 16
SILENT_S = 60.0  # periods may be long


class Decisions:
    """Instants are unix seconds."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, PlannerState]] = {}
        self._decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)

    def saw(self, state: PlannerState, unix: float) -> None:
        """Take a planner's state. Only decisions are kept, not every figure."""
        known = self._newest.get(state.planner)
        if known is None and len(self._newest) >= MAX_PLANNERS:
            return
        self._newest[state.planner] = unix, state
        before = None if known is None else known[1]
        if before is None or _gist(before) != _gist(state):
            moved = before is not None and before.incarnation == state.incarnation and state.moves > before.moves
            self._decisions.append(_json(state, unix) | {"moved": moved})

    def planners(self, unix: float) -> list[dict[str, Any]]:
        """The newest state of each live planner, the active one first."""
        self._newest = {name: seen for name, seen in self._newest.items() if unix - seen[0] < SILENT_S}
        states = [_json(state, at) for at, state in self._newest.values()]
        return sorted(states, key=lambda one: (not one["acts"], one["planner"]))

    def as_json(self) -> list[dict[str, Any]]:
        """Decisions, newest first."""
        return list(reversed(self._decisions))


def _gist(state: PlannerState) -> tuple[Any, ...]:
    parts = 2 if len(state.models) > 1 else 1  # a model's name stands before its reason
    reasons = [":".join(reason.split(":")[:parts]) for reason in state.reason.split(" | ")]
    return state.acts, reasons, state.workers, state.desired, state.moves, state.incarnation


def _json(state: PlannerState, unix: float) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(state)
    pressures = {role: round(value, 3) for role, value in state.pressures.items()}
    kept = {name: fields[name] for name in ("planner", "acts", "workers", "desired", "reason", "moves")}
    return kept | {"pressures": pressures, "at_unix": round(unix, 3)}
