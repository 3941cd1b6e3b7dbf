"""The fleet as admission sees it: who computes prompts how fast, what is in front of them, and what other gateways have."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from common.messages import GatewayState
from gateway.active import ActiveRequest
from gateway.admission import Capacity, prefillers
from gateway.owner import Phase
from gateway.placer import Placer

TOLD_AFTER_S = 0.6  # a worker's heartbeat tells of what it claimed after so long
SILENT_S = 3.0  # a gateway that was not heard for so long is gone


class Fleet:
    """The workers through `placer`, the other gateways through `saw`."""

    def __init__(self, placer: Placer, *, gateway_id: str, local: bool) -> None:
        self._placer = placer
        self._gateway_id = gateway_id
        self._local = local
        self._others: dict[str, tuple[float, GatewayState]] = {}

    def saw(self, state: GatewayState) -> None:
        """Take a gateway's heartbeat, also one of our own."""
        if state.gateway != self._gateway_id:
            self._others[state.gateway] = time.monotonic(), state

    def capacity(self, active: Iterable[ActiveRequest]) -> Capacity:
        """The fleet now; `active` are this gateway's started requests."""
        now = time.monotonic()
        self._others = {name: seen for name, seen in self._others.items() if now - seen[0] < SILENT_S}
        others = [state for _, state in self._others.values()]
        sent, unplaced = Counter[str](), sum(state.unclaimed_tokens for state in others)
        for request in active:
            state = request.state
            told = request.claimed_at is not None and now - request.claimed_at > TOLD_AFTER_S
            if state.phase is Phase.QUEUED and not state.assigned:
                unplaced += request.work
            elif state.phase is Phase.QUEUED or (state.phase is Phase.CLAIMED and not told):
                sent[state.assigned] += request.work
        return Capacity(
            workers=prefillers(
                self._placer.workers("prefill"), self._placer.workers("decode"), local=self._local, sent=sent
            ),
            gateways=1 + len(others),
            unplaced_tokens=unplaced,
            started_elsewhere=sum(state.started_tokens for state in others),
            waiting_elsewhere=sum(state.waiting_tokens for state in others),
        )
