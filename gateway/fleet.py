"""The fleet as admission sees it: who computes prompts how fast, what is in front of them, and what other gateways have."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.messages import GatewayState, WorkerState
from gateway.active import ActiveRequest
from gateway.admission import Capacity, prefillers
from gateway.owner import Phase
from gateway.placer import Placer

TOLD_AFTER_S = 0.05  # a worker's heartbeat tells of what it claimed so long before
SILENT_S = 3.0  # a gateway that was not heard for so long is gone


class HeardGateways:
    """The gateways that are heard now, from their heartbeats."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, GatewayState]] = {}

    def saw(self, state: GatewayState) -> None:
        """Take a heartbeat. A newcomer's makes those forgotten that were replaced by it: nobody may ask for `states` for long."""
        if state.gateway not in self._heard:
            self._forget_silent()
        self._heard[state.gateway] = time.monotonic(), state

    def states(self) -> list[GatewayState]:
        """The last state of each gateway that isn't silent, by name."""
        self._forget_silent()
        return [state for _, (_, state) in sorted(self._heard.items())]

    def __len__(self) -> int:
        return len(self._heard)

    def _forget_silent(self) -> None:
        now = time.monotonic()
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard[0] < SILENT_S}


class Fleet:
    """The workers through `placer`, the other gateways through `saw`."""

    def __init__(self, placer: Placer, *, gateway_id: str, local: bool) -> None:
        self._placer = placer
        self._gateway_id = gateway_id
        self._local = local
        self._others = HeardGateways()
        self._heard_at: dict[str, float] = {}  # worker -> its last heartbeat
        self._told: dict[str, _Told] = {}  # worker -> its last heartbeat

    def __len__(self) -> int:
        """Workers of which something is remembered."""
        return len(self._heard_at.keys() | self._told.keys())

    def heard(self, worker: str, now: float) -> None:
        """A worker's heartbeat arrived."""
        self._heard_at[worker] = now

    def forget(self, worker: str) -> None:
        """It is lost. Names may be new each time, as pods' are: without this they would be kept for ever."""
        self._heard_at.pop(worker, None)
        self._told.pop(worker, None)

    def saw(self, state: GatewayState) -> None:
        """Take a gateway's heartbeat, also one of our own."""
        if state.gateway != self._gateway_id:
            self._others.saw(state)

    def capacity(self, active: Iterable[ActiveRequest]) -> Capacity:
        """The fleet now; `active` are this gateway's started requests."""
        now = time.monotonic()
        others = self._others.states()
        unplaced = sum(state.unclaimed_tokens for state in others)
        ours, claimed = Counter[str](), defaultdict[str, list[ActiveRequest]](list)
        for request in active:
            state = request.state
            if state.phase is Phase.QUEUED and not state.assigned:
                unplaced += request.work
            elif state.phase in (Phase.QUEUED, Phase.CLAIMED):
                ours[state.assigned] += request.work
                if state.phase is Phase.CLAIMED:
                    claimed[state.assigned].append(request)
        prefill, decode = self._placer.workers("prefill"), self._placer.workers("decode")
        queued = {
            state.worker: ours[state.worker] + self._told_beyond(state, claimed[state.worker], now)
            for state in (*prefill, *decode)
        }
        return Capacity(
            workers=prefillers(prefill, decode, local=self._local, queued=queued),
            gateways=1 + len(others),
            unplaced_tokens=unplaced,
            started_elsewhere=sum(state.started_tokens for state in others),
            waiting_elsewhere=sum(state.waiting_tokens for state in others),
        )

    def _told_beyond(self, state: WorkerState, claimed: list[ActiveRequest], now: float) -> int:
        """What to add to our own prompt tokens at a worker, by its heartbeat: other gateways', less what it has computed of ours.

        Which prompts are ours is known exactly at any time, and a heartbeat is up to half a second old.
        """
        told = self._told.get(state.worker)
        if told is None or told.state is not state:
            told_at = self._heard_at.get(state.worker, now) - TOLD_AFTER_S
            ours = [one for one in claimed if one.claimed_at is not None and one.claimed_at < told_at]
            told = self._told[state.worker] = _Told.of(state, ours)
        return told.others - (told.computed if told.longest in claimed else 0)


@dataclass(frozen=True, slots=True)
class _Told:
    """A heartbeat, taken apart when it was new."""

    state: WorkerState
    others: int  # prompt tokens of other gateways
    longest: ActiveRequest | None  # of ours: the one that was being computed, if that shows at all
    computed: int  # of it

    @classmethod
    def of(cls, state: WorkerState, ours: Sequence[ActiveRequest]) -> _Told:
        # until a prompt is begun, the worker counts what it has cached of it as well
        least, most = sum(one.work for one in ours), sum(len(one.state.token_ids) for one in ours)
        longest = max(ours, key=lambda one: one.work, default=None)
        computed = max(0, least - state.queued_tokens)
        return cls(state, max(0, state.queued_tokens - most), longest, min(computed, longest.work if longest else 0))
