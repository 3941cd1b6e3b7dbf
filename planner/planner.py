"""The planner's loop: observe heartbeats, decide by `planner.policy`, tell the worker.

Nothing survives a restart; its pauses begin anew. Of several planners the one with the smallest name acts; the others
decide and report only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common import subjects
from common.bus import Bus
from common.errors import UnavailableError
from common.messages import (
    GatewayState,
    PlannerState,
    RolesReply,
    SetRoles,
    gateway_state_decoder,
    planner_state_decoder,
    worker_reply_decoder,
)
from common.peers import Peers
from common.words import Role
from planner.counts import Counts, hold
from planner.observed import ROLES, Observed, WorkerLoad, observe_models
from planner.policy import Decision, Memory, Move, plan
from planner.pools import Pools, by_model, look
from planner.settings import PlanSettings

log = logging.getLogger("baton.planner")

GATEWAY_SILENT_S = 5.0
SWITCH_TIMEOUT_S = 10.0  # a worker opens links before it answers
REFUSED_FOR_S = 300.0  # pause before a worker that refused is asked again
MAX_NAMED = 1_000
MAX_REASON_CHARS = 500  # a heartbeat's text may have 512
SILENT_PERIODS = 3  # a planner that misses this many periods is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """The planner's identity and settings."""

    planner_id: str
    incarnation: int = 0
    period_s: float = 2.0  # between two decisions
    dry_run: bool
    plan: PlanSettings


class Planner:
    """The loop: listens, decides each period, orders moves. `report` gets each decision with its pressures."""

    def __init__(
        self, bus: Bus, peers: Peers, config: PlannerConfig, *, report: Callable[[PlannerState], None] = lambda _: None
    ) -> None:
        self._bus = bus
        self._peers = peers
        self._config = config
        self._report = report
        self._gateways: dict[str, tuple[float, GatewayState]] = {}
        self._planners: dict[tuple[str, int], float] = {}  # others (id, incarnation), and when they were heard
        self._named: set[str] = set()  # planners whose subject carries their name
        self._refused: dict[tuple[str, int], float] = {}  # (worker, incarnation) and when it refused
        self._me = config.planner_id, config.incarnation
        self._memories: dict[str, Memory] = {}  # by model
        self._counts: dict[str, Counts] = {}  # likewise
        self._pools: dict[str, Pools] = {}  # likewise, of models of vectors and scores
        self._said: dict[str, str] = {}  # likewise
        self.moves = 0

    async def start(self) -> None:
        """Listen to gateways and other planners; `peers` listens to the workers."""
        await self._bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._saw_gateway)
        await self._bus.subscribe(subjects.planner(subjects.ANY), planner_state_decoder, self._saw_named)
        await self._bus.subscribe(subjects.PLANNER, planner_state_decoder, self._saw_planner)

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), self._config.period_s)
                return
            if self._bus.connected:  # without the bus all figures are stale
                await self._decide()

    async def _decide(self) -> None:
        now = time.monotonic()
        observed, acts = self._observe(now), self._acts(now)
        memories, settings = self._memories, self._config.plan
        decisions = {
            model: plan(now, of_model, memories.get(model, Memory()), settings) for model, of_model in observed.items()
        }
        self._memories = {model: decision.memory for model, decision in decisions.items()}
        self._counts = {
            model: hold(now, observed[model], decision, self._counts.get(model), settings)
            for model, decision in decisions.items()
        }
        self._pools = {
            model: look(now, states, self._pools.get(model), settings)
            for model, states in by_model(self._peers.ready(Role.POOL)).items()
        }
        self._said = {model: said for model, said in self._said.items() if model in decisions}
        for model, decision in decisions.items():
            self._say(model, decision, acts=acts)
            if decision.move is not None and acts:
                await self._carry_out(decision.move, decision.reason)
        workers = [worker for of_model in observed.values() for worker in of_model.workers]
        state = self._state(workers, decisions, acts=acts)
        self._report(state)
        with contextlib.suppress(UnavailableError):
            for subject in (subjects.planner(self._config.planner_id), subjects.PLANNER):
                await self._bus.publish(subject, state)

    def _observe(self, now: float) -> dict[str, Observed]:
        self._gateways = {name: seen for name, seen in self._gateways.items() if now - seen[0] < GATEWAY_SILENT_S}
        self._refused = {worker: at for worker, at in self._refused.items() if now - at < REFUSED_FOR_S}
        ready = {state.worker: state for role in ROLES for state in self._peers.ready(role)}
        return observe_models(ready.values(), [state for _, state in self._gateways.values()], refused=self._refused)

    def _acts(self, now: float) -> bool:
        silent_s = SILENT_PERIODS * self._config.period_s
        self._planners = {one: at for one, at in self._planners.items() if now - at < silent_s}
        return not self._config.dry_run and all(self._me < other for other in self._planners)

    async def _carry_out(self, move: Move, reason: str) -> None:
        known = self._peers.states.get(move.worker)
        message = SetRoles(roles=list(move.roles), reason=reason)
        try:
            reply = await self._bus.request(
                self._peers.to(move.worker, self._config.planner_id, subjects.plan),
                message,
                worker_reply_decoder,
                timeout_s=SWITCH_TIMEOUT_S,
            )
        except UnavailableError as error:
            reply = RolesReply(accepted=False, roles=[], reason=error.message)
        if isinstance(reply, RolesReply) and reply.accepted:
            self.moves += 1
            return
        if known is not None:
            self._refused[known.worker, known.incarnation] = time.monotonic()
        why = reply.reason if isinstance(reply, RolesReply) else "it knows no roles"
        log.warning("planner.refused", extra={"worker": move.worker, "why": why})

    # -- what others are told ----------------------------------------------------------------------------------------

    def _say(self, model: str, decision: Decision, *, acts: bool) -> None:
        """Log moves and changed reasons at info level, repeated reasons at debug level."""
        extra: dict[str, object] = {"reason": decision.reason, "desired": decision.desired, "acts": acts}
        extra["model"] = model
        extra |= {role: round(decision.pressures.of(role), 3) for role in ROLES}
        gist = decision.reason.partition(":")[0]
        if decision.move is not None:
            extra |= {"worker": decision.move.worker, "roles": decision.move.roles}
            log.info("planner.move", extra=extra)
        else:
            log.log(logging.DEBUG if gist == self._said.get(model) else logging.INFO, "planner.stays", extra=extra)
        self._said[model] = gist

    def _state(self, workers: Sequence[WorkerLoad], decisions: Mapping[str, Decision], *, acts: bool) -> PlannerState:
        desired = {model: {str(role): count for role, count in one.desired.items()} for model, one in decisions.items()}
        known: dict[str, Counts | Pools] = {**self._counts, **self._pools}
        return PlannerState(
            planner=self._config.planner_id,
            acts=acts,
            workers={role: sum(role in worker.roles for worker in workers) for role in ROLES},
            desired={role: sum(one[role] for one in desired.values()) for role in ROLES},
            pressures={role: max(one.pressures.of(role) for one in decisions.values()) for role in ROLES},
            reason=self._reason(decisions)[:MAX_REASON_CHARS],
            moves=self.moves,
            incarnation=self._config.incarnation,
            models={model: counts for model, counts in desired.items() if model}
            | {model: {str(Role.POOL): one.desired} for model, one in self._pools.items()},
            wanted={model: told for model, one in known.items() if model and (told := one.told())},
        )

    def _reason(self, decisions: Mapping[str, Decision]) -> str:
        """The reasons of all models, each after its name where there are several."""
        said = {model: one.reason for model, one in decisions.items() if model or not self._pools}
        said |= {model: one.reason for model, one in self._pools.items()}
        return " | ".join(f"{model}: {reason}" if len(said) > 1 else reason for model, reason in said.items())

    def _saw_gateway(self, state: GatewayState) -> None:
        self._gateways[state.gateway] = time.monotonic(), state

    def _saw_named(self, state: PlannerState) -> None:
        if state.planner not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(state.planner)
        self._take_planner(state)

    def _saw_planner(self, state: PlannerState) -> None:
        """Note another planner's heartbeat; release 0.1.0 sends no name."""
        if state.planner not in self._named:
            self._take_planner(state)

    def _take_planner(self, state: PlannerState) -> None:
        other = state.planner, state.incarnation
        if other != self._me:
            self._planners[other] = time.monotonic()
