"""The registry and the load ledger in memory. Places are chosen by the dice, as any hint could be."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

from common.errors import UnavailableError
from common.messages import WorkerState
from common.store import RedisSettings
from gateway.placement.ledger import PLACE_TIMEOUT_S, PlacementRequest
from gateway.request.placement import Charged, Placement, Reason
from tests.simulation.clock import VirtualLoop
from tests.simulation.weather import Weather

TIMEOUT_S = RedisSettings().timeout_s
Charge = tuple[str, str, str]  # request:attempt, stage, worker


class Ledger:
    """What Redis holds. `strict`: no charge is ever given back by time alone, so that one that leaks shows."""

    def __init__(self, loop: VirtualLoop, weather: Weather, faults: Any) -> None:
        self.loop = loop
        self.weather = weather
        self.faults = faults
        self.registered: dict[str, tuple[WorkerState, float]] = {}
        self._charges: dict[Charge, float] = {}
        self.strict = True
        self.holders: random.Random | None = None  # whose dice say from whom prompts are pulled; None: from nobody

    def charges(self) -> list[Charge]:
        """What is charged now to workers that the registry still knows."""
        now = self.loop.now
        return [
            charge
            for charge, until in self._charges.items()
            if (self.strict or until > now) and charge[2] in self.registered
        ]

    def charge(self, request: str, worker: str, stage: str, until: float) -> None:
        self._charges[request, stage, worker] = until

    def discharge(self, request: str, stage: str) -> None:
        for charge in [charge for charge in self._charges if charge[:2] == (request, stage)]:
            del self._charges[charge]

    def forget(self, worker: str) -> None:
        for charge in [charge for charge in self._charges if charge[2] == worker]:
            del self._charges[charge]

    def live(self) -> list[WorkerState]:
        """Workers whose lease is valid."""
        for worker, (_, until) in list(self.registered.items()):
            if until <= self.loop.now:
                del self.registered[worker]
                self.forget(worker)
        return [state for state, _ in self.registered.values()]

    async def call(self, action: Callable[[], Any], timeout_s: float) -> Any:
        """Do something there within the time-out of the caller. Raises UnavailableError, done or not."""
        way_s = self.weather.way_s()
        if way_s > timeout_s:  # the caller has gone its other way by the time that it is done
            self.faults["store late"] += 1
            self.strict = False  # a charge that comes after its release is left to its time
            self.loop.call_later(way_s, action, context=Context())
            await asyncio.sleep(timeout_s)
            raise UnavailableError("the store takes too long")
        await asyncio.sleep(way_s)
        result = action() if not self.is_down or self.weather.dice.random() < 0.5 else None
        if self.is_down:
            self.faults["store down"] += 1
            raise UnavailableError("the store is away")
        return result

    @property
    def is_down(self) -> bool:
        begin, end = self.weather.store_down
        return begin <= self.loop.now < end


class SimStore:
    """`Store` of one process."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def register(self, state: WorkerState, *, ttl_ms: int = 3_000) -> bool:
        ledger = self._ledger

        def register() -> bool:
            known = ledger.registered.get(state.worker)
            unknown = known is None or known[0].incarnation != state.incarnation
            if unknown:
                ledger.forget(state.worker)
            ledger.registered[state.worker] = (state, ledger.loop.now + ttl_ms / 1000)
            return unknown

        return bool(await ledger.call(register, TIMEOUT_S))

    async def unregister(self, worker: str, incarnation: int) -> None:
        ledger = self._ledger

        def unregister() -> None:
            known = ledger.registered.get(worker)
            if known is not None and known[0].incarnation == incarnation:
                del ledger.registered[worker]
                ledger.forget(worker)

        await ledger.call(unregister, TIMEOUT_S)

    async def announce(self, worker: str, incarnation: int, added: list[bytes], removed: list[bytes]) -> None:
        await self._ledger.call(lambda: None, TIMEOUT_S)

    async def place(self, request: PlacementRequest) -> Placement:
        placement = await self._ledger.call(lambda: self._place(request), PLACE_TIMEOUT_S)
        if placement is None:
            raise UnavailableError("no decode worker")
        return placement  # type: ignore[no-any-return]

    def _place(self, request: PlacementRequest) -> Placement | None:
        ledger, dice = self._ledger, self._ledger.weather.dice
        name = f"{request.request_id}:{request.attempt}"
        for stage in ("prefill", "decode"):
            ledger.discharge(name, stage)
        states = [s for s in ledger.live() if s.status == "ready" and s.worker not in request.exclude]
        decoders = [state.worker for state in states if "decode" in state.roles]
        prefillers = [state.worker for state in states if "prefill" in state.roles]
        if not decoders:
            return None
        dice.shuffle(decoders)
        prefill = dice.choice(prefillers) if prefillers and dice.random() < 0.85 else decoders[0]
        until = ledger.loop.now + max(1, request.deadline_ms) / 1000
        ledger.charge(name, prefill, "prefill", until)
        ledger.charge(name, decoders[0], "decode", until)
        is_local = prefill == decoders[0]
        placement = Placement(prefill=prefill, decode=[] if is_local else decoders, reason=Reason.OTHER)
        if ledger.holders is None:
            return placement
        holder = ledger.holders.choice([state.worker for state in states])
        return dataclasses.replace(placement, holder=holder, holder_blocks=len(request.digests))

    async def release(self, charges: Sequence[Charged]) -> int:
        def release() -> int:
            for one in charges:
                for stage in one.stages:
                    self._ledger.discharge(f"{one.request_id}:{one.attempt}", stage)
            return len(charges)

        return int(await self._ledger.call(release, TIMEOUT_S))
