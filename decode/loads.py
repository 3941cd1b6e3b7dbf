"""Loads for handoffs: what lower tiers have of a prompt comes back while another worker computes it, and is not sent."""

from __future__ import annotations

from collections.abc import Callable

from common.policy import placement_policy
from engine.sequence import Sequence
from worker.pulls.loads import Loads
from worker.tier.host_tier import HostTier

# A writer takes a second for silence.
LOAD_WAIT_S = 0.5


class HandoffLoads:
    """The loads that questions for room wait for. None begins where the link brings blocks faster."""

    def __init__(self, tier: HostTier) -> None:
        self._tier, self._loads = tier, Loads(tier)

    async def bring(self, sequence: Sequence, *, link_bytes_per_s: float, has_room: Callable[[], bool]) -> None:
        """Return once the pool has what tiers had of a prompt, or after `LOAD_WAIT_S`.

        `link_bytes_per_s`: the writer's, 0 where it measured none.
        """
        policy, tier = placement_policy(), self._tier
        link = link_bytes_per_s or policy["handoff"]["default_link_bytes_per_s"]
        files, loading = tier.file_totals(), policy["loading"]
        if link > (tier.totals().load_bytes_per_s or loading["default_host_bytes_per_s"]):
            return
        disk = 0.0 if files is None else files.load_bytes_per_s or loading["default_disk_bytes_per_s"]
        await self._loads.bring(sequence, within_s=LOAD_WAIT_S, has_room=has_room, reads=disk >= link)
