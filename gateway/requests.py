"""The owner of every request of this gateway: admission, placement, claims, tokens, retries, deadlines, cancellation.

What a request's state is and may become is `gateway.owner.RequestState`. What is done about it is in `attempts`, `listening` and
`watching`; this file is what HTTP sees.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from common import subjects
from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
)
from common.messages import (
    WorkerState,
    frame_decoder,
    gateway_state_decoder,
    to_gateway_decoder,
)
from gateway.active import ActiveRequest, timeline_of
from gateway.generation import GenerationSpec
from gateway.listening import Listening
from gateway.tenants import Tenant
from gateway.timeline import Timelines
from gateway.watching import Watching

DRAIN_CHECK_S = 0.02


class Requests(Listening, Watching):
    """Implements `gateway.generation.Generations` over the bus."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for workers; from now on requests can be submitted."""
        await self._bus.serve(subjects.gateway(self._gateway_id), to_gateway_decoder, self._handle)
        await self._bus.subscribe(subjects.frames(self._gateway_id), frame_decoder, self._on_frame)
        await self._bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._fleet.saw)
        self._peers.on_lost(self._on_lost)
        self._peers.on_heard(self._heard)
        self._peers.on_changed(self._on_changed)
        self._loops = [self._spawn(self._beat()), self._spawn(self._watch())]

    async def drain(self, timeout_s: float) -> None:
        """Take no more; serve those who wait and let what runs end; after `timeout_s` end it with an error."""
        self._draining = True
        give_up_at = time.monotonic() + timeout_s
        while (self._active or self._room.in_flight) and time.monotonic() < give_up_at:
            await asyncio.sleep(DRAIN_CHECK_S)
        self._room.refuse_all(UnavailableError(self.not_ready_reason))
        for active in list(self._active.values()):
            self._end(active, UnavailableError("the gateway is shutting down"), cancel="gateway drained")

    async def close(self) -> None:
        """Stop listening and beating."""
        for loop in self._loops:
            loop.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)

    # -- what HTTP sees ----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self._room.in_flight

    @property
    def waiting(self) -> Mapping[str, tuple[int, int]]:
        return self._room.waiting

    @property
    def counters(self) -> Counter[str]:
        refused = {f"refused:{reason}": count for reason, count in self._room.refused.items()}
        return self._counters + Counter(refused) + Counter({f"work:{k}": v for k, v in self._room.work.items()})

    @property
    def timelines(self) -> Timelines:
        return self._timelines

    @property
    def fleet(self) -> list[WorkerState]:
        return list(self._peers.states.values())

    @property
    def ready_workers(self) -> dict[str, int]:
        return {role: len(self._placer.workers(role)) for role in ("prefill", "decode")}

    @property
    def max_model_len(self) -> int | None:
        lengths = [state.max_model_len for state in self._placer.workers("decode") + self._placer.workers("prefill")]
        return min(lengths, default=None)

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        if self._draining:
            return "the gateway is shutting down"
        if not self._bus.connected:
            return "no connection to NATS"
        if not self._placer.workers("decode"):
            return "no decode worker is ready"
        return ""

    def turn_away(self, tenant: Tenant, *, priority: int, first_token_s: float = math.inf) -> None:
        if self.not_ready_reason:
            raise UnavailableError(self.not_ready_reason)
        self._room.turn_away(tenant, priority=priority, first_token_s=first_token_s)

    async def submit(self, specs: Sequence[GenerationSpec]) -> list[ActiveRequest]:
        received = time.monotonic()
        for spec in specs:
            self._check(spec)
        lines = [timeline_of(spec, received) for spec in specs]
        with self._timelines.waiting(lines):
            waited_s = await self._room.enter(specs)
            begun: list[ActiveRequest] = []
            try:
                for spec, line in zip(specs, lines, strict=True):
                    begun.append(await self._begin(spec, line, waited_s))
            except BaseException:
                for active in begun:
                    self._end(active, None, cancel="not all choices could start")
                for spec in specs:
                    self._room.ended(spec, 0)
                raise
        return begun

    def _check(self, spec: GenerationSpec) -> None:
        if self.not_ready_reason:
            raise UnavailableError(self.not_ready_reason)
        if spec.deadline_s <= 0:
            raise DeadlineExceededError("the deadline has passed")
        limit = self.max_model_len
        if limit is not None and len(spec.token_ids) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(spec.token_ids)} tokens, the context {limit}", param="prompt"
            )
        if spec.request_id in self._active:
            raise InvalidRequestError(f"request {spec.request_id} is running already", param="request_id")
