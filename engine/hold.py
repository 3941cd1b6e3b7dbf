"""The wish under which a sequence's blocks are released to the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.messages import NO_KEEP, Keep


@dataclass(slots=True, eq=False)
class Hold:
    """The wish under which a sequence's blocks are released: one state of a session, if it names one."""

    keep: Keep
    tier: int = 0  # the sign of the request's priority
    until: float = -math.inf  # since the last release, unless a newer state superseded this one
    blocks: dict[int, None] = field(default_factory=dict)  # ordered by their release
    num_handed_on: int = 0  # blocks that newer states of the session have now
    is_timed: bool = False

    @classmethod
    def of(cls, keep: Keep, priority: int) -> Hold | None:
        """The hold of a request; None if it says nothing."""
        tier = (priority > 0) - (priority < 0)
        return cls(keep, tier) if tier or keep != NO_KEEP else None

    def follows(self, other: Hold) -> bool:
        """True if both are states of one session."""
        return bool(self.keep.session) and self.keep.session == other.keep.session
