"""One waiting room a model: a flood of requests for one model delays no other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from common.errors import ServingError
from common.messages import GatewayState, ModelLevels, ModelLoad
from gateway.admission.waiting_room import WaitingRoom
from gateway.request.active import ActiveRequest
from gateway.request.spec import GenerationSpec
from gateway.tenants.tenants import Tenant


class WaitingRooms:
    """The waiting rooms by model. `make(model)` is called on first use."""

    def __init__(self, make: Callable[[str], WaitingRoom]) -> None:
        self._make = make
        self._rooms: dict[str, WaitingRoom] = {}

    @property
    def models(self) -> list[str]:
        return list(self._rooms)

    def of(self, model: str) -> WaitingRoom:
        if model not in self._rooms:
            self._rooms[model] = self._make(model)
        return self._rooms[model]

    # -- one request -----------------------------------------------------------------------------------------------

    def turn_away(self, model: str, tenant: Tenant, *, priority: int, first_token_s: float = math.inf) -> None:
        """See `WaitingRoom.turn_away`. Raises RefusedError."""
        self.of(model).turn_away(tenant, priority=priority, first_token_s=first_token_s)

    async def enter(self, specs: Sequence[GenerationSpec]) -> float:
        """See `WaitingRoom.enter`. Raises RefusedError."""
        return await self.of(specs[0].model).enter(specs)

    def placed(self, spec: GenerationSpec, work: int) -> None:
        """See `WaitingRoom.placed`."""
        self.of(spec.model).placed(spec, work)

    def computed(self, spec: GenerationSpec, *, is_first: bool = True) -> None:
        """See `WaitingRoom.computed`."""
        self.of(spec.model).computed(spec, is_first=is_first)

    def ended(self, spec: GenerationSpec, generated: int) -> None:
        self.of(spec.model).ended(spec, generated)

    # -- all of them -----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return sum(room.in_flight for room in self._rooms.values())

    @property
    def active(self) -> list[str]:
        """The models with requests that wait or run."""
        return [model for model, room in self._rooms.items() if room.in_flight]

    @property
    def waiting(self) -> Mapping[str, tuple[int, int]]:
        """Tier -> waiting choices and prompt tokens, of all models."""
        sums: dict[str, tuple[int, int]] = {}
        for room in self._rooms.values():
            for tier, (requests, tokens) in room.waiting.items():
                before = sums.get(tier, (0, 0))
                sums[tier] = before[0] + requests, before[1] + tokens
        return sums

    def counters(self, model: str) -> Counter[str]:
        """Refusals by reason, and tokens by tenant."""
        room = self.of(model)
        refused = {f"refused:{reason}": count for reason, count in room.refused.items()}
        return Counter(refused) + Counter({f"work:{tenant}": tokens for tenant, tokens in room.work.items()})

    def look_again(self) -> None:
        """See `WaitingRoom.look_again`."""
        for room in self._rooms.values():
            room.look_again()

    def refuse_all(self, error: ServingError) -> None:
        for room in self._rooms.values():
            room.refuse_all(error)

    def _level(self, model: str, state: GatewayState, load: ModelLoad) -> ModelLevels:
        """A model's figures of the heartbeat, with what waits in its room."""
        level, room = state.levels.get(model, ModelLevels()), self._rooms[model]
        if room.waits_for_places:
            return msgspec.structs.replace(level, handing_over=level.handing_over + room.queued_requests)
        return msgspec.structs.replace(level, queued_tokens=level.queued_tokens + load.waiting_tokens)

    def tell(self, state: GatewayState, active: Iterable[ActiveRequest]) -> GatewayState:
        """Complete the heartbeat with waiting and started work; `active` are the started requests."""
        requests = list(active)
        loads = {
            model: room.load([one for one in requests if one.state.spec.model == model])
            for model, room in self._rooms.items()
        }
        for_places = [room for room in self._rooms.values() if room.waits_for_places]
        others = [model for model, room in self._rooms.items() if room not in for_places]
        return msgspec.structs.replace(
            state,
            queued_requests=state.queued_requests + sum(self._rooms[model].queued_requests for model in others),
            queued_tokens=state.queued_tokens + sum(loads[model].waiting_tokens for model in others),
            handing_over=state.handing_over + sum(room.queued_requests for room in for_places),
            waiting_tokens=sum(load.waiting_tokens for load in loads.values()),
            started_tokens=sum(load.started_tokens for load in loads.values()),
            unclaimed_tokens=sum(load.unclaimed_tokens for load in loads.values()),
            models=loads,
            levels=state.levels | {model: self._level(model, state, load) for model, load in loads.items()},
        )
