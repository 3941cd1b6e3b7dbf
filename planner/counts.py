"""The workers that a model should have by role, for hosts that start and stop them: the policy's targets, held against haste.

A count grows once more workers were needed all through `hold_s`, to the fewest of that time. It falls once fewer were enough all
through `reverse_s`, to the most of that time. It grows no further while workers are still missing that it asked for, and waits
where moving a worker to the role helps: that is cheaper. Nothing is told of a model until it was watched for `hold_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from common.words import Role
from planner.observed import ROLES, Observed, with_role
from planner.policy import Decision
from planner.settings import PlanSettings


@dataclass(frozen=True, slots=True)
class Held:
    """A role's count, and the change that it considers."""

    count: int
    since: float  # when targets went to the present side of the count
    nearest: int  # to the count, of the targets since then


@dataclass(frozen=True, slots=True)
class Counts:
    """The memory passed from one decision about a model to the next. Instants are of one clock."""

    began_at: float  # it is watched
    roles: Mapping[Role, Held] = field(default_factory=dict)

    def told(self) -> dict[str, int]:
        """The workers that the model should have, by role; empty before they are known."""
        return {str(role): held.count for role, held in self.roles.items()}


def hold(now: float, observed: Observed, decision: Decision, before: Counts | None, settings: PlanSettings) -> Counts:
    """The counts after a decision; `before`: None for a model that is seen for the first time."""
    if before is None or observed.num_models > 1 or observed.is_sum:  # such loads are told as one sum
        return Counts(began_at=now)
    present = {role: len(with_role(observed.workers, role)) for role in ROLES}
    if not before.roles:
        if now - before.began_at < settings.hold_s:
            return before
        return replace(before, roles={role: Held(present[role], now, present[role]) for role in ROLES})
    gaining = decision.memory.pressed
    return replace(
        before,
        roles={
            role: held_after(now, held, decision.desired[role], present[role], settings, may_grow=gaining != role)
            for role, held in before.roles.items()
        },
    )


def held_after(now: float, held: Held, target: int, present: int, settings: PlanSettings, *, may_grow: bool) -> Held:
    """A role's count after a decision for `target`, with `present` workers."""
    count = held.count
    if target == count or (target > count and not (may_grow and present >= count)):
        return Held(count, now, count)
    if (held.nearest - count) * (target - count) <= 0:  # the other side, or none yet
        return Held(count, now, target)
    nearest = min(held.nearest, target) if target > count else max(held.nearest, target)
    waits_s = settings.hold_s if target > count else settings.reverse_s
    return Held(nearest, now, nearest) if now - held.since >= waits_s else Held(count, held.since, nearest)
