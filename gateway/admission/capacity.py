"""The fleet as admission sees it: workers' rates and queues, and other gateways' load."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.messages import GatewayState, ModelLoad, TenantPlaces, WorkerState
from common.words import Role
from gateway.admission.supply import Capacity, Places, prefillers
from gateway.placement.placer import Placer
from gateway.request.active import ActiveRequest
from gateway.request.state import Phase

HEARTBEAT_LAG_S = 0.05  # a heartbeat is at least this old when it arrives
SILENT_S = 3.0  # a gateway unheard for this long is gone


class HeardGateways:
    """The gateways that still send heartbeats."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, GatewayState]] = {}

    def saw(self, state: GatewayState) -> None:
        """Take a heartbeat. A new gateway triggers the clean-up of silent ones, in case `states` is not called for long."""
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
    """The fleet's state, from `placer` for workers and from `saw` for other gateways."""

    def __init__(self, placer: Placer, *, gateway_id: str, local: bool) -> None:
        self._placer = placer
        self._gateway_id = gateway_id
        self._local = local
        self._others = HeardGateways()
        self._heard_at: dict[str, float] = {}  # worker -> its last heartbeat
        self._told: dict[str, _Told] = {}  # worker -> its last heartbeat

    def __len__(self) -> int:
        """Number of workers with remembered state."""
        return len(self._heard_at.keys() | self._told.keys())

    def heard(self, worker: str, now: float) -> None:
        self._heard_at[worker] = now

    def forget(self, worker: str) -> None:
        """Forget a lost worker: pods get new names, so entries must not accumulate."""
        self._heard_at.pop(worker, None)
        self._told.pop(worker, None)

    def saw(self, state: GatewayState) -> None:
        """Take a gateway's heartbeat; our own is ignored."""
        if state.gateway != self._gateway_id:
            self._others.saw(state)

    def capacity(self, active: Iterable[ActiveRequest], *, model: str = "", weights: str = "") -> Capacity:
        """The fleet now, for one model or for all; `active` are this gateway's started requests."""
        now = time.monotonic()
        others = [_load_of(state, model) for state in self._others.states()]
        unplaced = sum(load.unclaimed_tokens for load in others)
        decoders: dict[str, str] = {}
        ours, claimed = Counter[str](), defaultdict[str, list[ActiveRequest]](list)
        for request in active:
            state = request.state
            if model and state.spec.model != model:
                continue
            if state.decoder is not None and request.place.since is not None:
                decoders[state.spec.request_id] = state.decoder.worker
            if state.phase is Phase.QUEUED and not state.assigned:
                unplaced += request.work
            elif state.phase in (Phase.QUEUED, Phase.CLAIMED):
                ours[state.assigned] += request.work
                if state.phase is Phase.CLAIMED:
                    claimed[state.assigned].append(request)
        prefill, decode = self._workers(Role.PREFILL, model, weights), self._workers(Role.DECODE, model, weights)
        queued = {
            state.worker: ours[state.worker] + self._told_beyond(state, claimed[state.worker], now)
            for state in (*prefill, *decode)
        }
        return Capacity(
            places=_places(decode, decoders, self._places_elsewhere(model)),
            workers=prefillers(prefill, decode, local=self._local, queued=queued),
            gateways=1 + len(others),
            unplaced_tokens=unplaced,
            started_elsewhere=sum(load.started_tokens for load in others),
            waiting_elsewhere=sum(load.waiting_tokens for load in others),
        )

    def _places_elsewhere(self, model: str) -> tuple[dict[str, TenantPlaces], ...]:
        return tuple(state.models.get(model, ModelLoad()).tenants for state in self._others.states())

    def _workers(self, role: Role, model: str, weights: str) -> list[WorkerState]:
        return [] if model and not weights else self._placer.workers(role, weights)

    def _told_beyond(self, state: WorkerState, claimed: list[ActiveRequest], now: float) -> int:
        """Prompt tokens that other gateways queued at a worker, less those of ours computed since.

        Our own are known exactly; a heartbeat is up to half a second old.
        """
        told = self._told.get(state.worker)
        if told is None or told.state is not state:
            told_at = self._heard_at.get(state.worker, now) - HEARTBEAT_LAG_S
            ours = [one for one in claimed if one.claimed_at is not None and one.claimed_at < told_at]
            told = self._told[state.worker] = _Told.of(state, ours)
        return told.others - (told.computed if told.longest in claimed else 0)


def _places(
    decode: Iterable[WorkerState], decoders: Mapping[str, str], others: tuple[dict[str, TenantPlaces], ...]
) -> Places:
    """`decoders`: the decode workers of our streams, by request."""
    most = {state.worker: state.max_sequences for state in decode}
    if not all(most.values()):
        return Places(others=others)
    leaving = frozenset(request_id for request_id, worker in decoders.items() if worker not in most)
    return Places(total=sum(most.values()) + len(leaving), leaving=leaving, others=others)


def _load_of(state: GatewayState, model: str) -> GatewayState | ModelLoad:
    """Another gateway's load of a model. An older release sends only sums over all models."""
    if not model or not state.models:
        return state
    return state.models.get(model, ModelLoad())


@dataclass(frozen=True, slots=True)
class _Told:
    """Figures derived from a new heartbeat."""

    state: WorkerState
    others: int  # prompt tokens of other gateways
    longest: ActiveRequest | None  # our request that the worker was computing, if known
    computed: int  # tokens of it computed by then

    @classmethod
    def of(cls, state: WorkerState, ours: Sequence[ActiveRequest]) -> _Told:
        # The worker counts cached tokens, too, until it starts a prompt.
        least, most = sum(one.work for one in ours), sum(len(one.state.token_ids) for one in ours)
        longest = max(ours, key=lambda one: one.work, default=None)
        computed = max(0, least - state.queued_tokens)
        return cls(state, max(0, state.queued_tokens - most), longest, min(computed, longest.work if longest else 0))
