"""The owner of all requests of this gateway, as HTTP sees it.

`gateway.request.state` is a request's state. `attempts` (place, queue, move, end), `inbox` (messages from workers) and `watchdog`
(time) change it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common import subjects
from common.bus import Bus
from common.errors import DeadlineExceededError, InvalidRequestError, UnavailableError
from common.messages import (
    HostState,
    WorkerState,
    frame_decoder,
    gateway_state_decoder,
    host_state_decoder,
    to_gateway_decoder,
)
from common.peers import Peers
from common.tracing import NoTracer, Tracer
from common.words import Role
from gateway.admission.capacity import Fleet
from gateway.admission.policy import RequestLimits
from gateway.admission.rooms import WaitingRooms
from gateway.admission.supply import Capacity
from gateway.admission.waiting_room import WaitingRoom
from gateway.answers.catalogue import Catalogue
from gateway.answers.tokenizer import ChatTokenizer
from gateway.lifecycle.attempts import Attempts
from gateway.lifecycle.inbox import Inbox
from gateway.lifecycle.newcomers import Newcomers, Read
from gateway.lifecycle.outbox import Heartbeat, Means, Orders
from gateway.lifecycle.probes import Losses, Probes
from gateway.lifecycle.pulse import Pulse
from gateway.lifecycle.running import Background, Keeping, Records, Running, Seen, Suspects
from gateway.lifecycle.watchdog import Watchdog
from gateway.observe.attainment import ServiceLevels
from gateway.observe.spans import RequestSpans
from gateway.placement.agreement import Agreement, Own
from gateway.placement.hosts import FOREVER_S, Hosts
from gateway.placement.incumbents import Incumbents
from gateway.placement.placer import PlacementStore, Placer
from gateway.pooling.service import PoolingModels
from gateway.request.active import ActiveRequest, timeline_of
from gateway.request.placement import Difference
from gateway.request.spec import GenerationSpec, Load, longest
from gateway.request.timeline import Timelines
from gateway.tenants.shares import Alias
from gateway.tenants.tenants import Tenant

DRAIN_CHECK_S = 0.02
CLOSE_TIMEOUT_S = 2.0
TELL_PERIOD_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSettings:
    """A gateway's name, and what it promises its clients."""

    gateway_id: str
    incarnation: int
    limits: RequestLimits = field(default_factory=RequestLimits)
    levels: ServiceLevels = field(default_factory=ServiceLevels)
    keep_s: float = FOREVER_S  # from a hosted model's last request until it is unloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModels:
    """The models that a gateway serves, by name; without any it takes requests that name none."""

    tokenizers: Mapping[str, ChatTokenizer] = field(default_factory=dict)
    known: Mapping[str, Own] = field(default_factory=dict)  # their other facts
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    incumbents: Incumbents | None = None
    pooling: PoolingModels | None = None  # those that generate nothing
    patterns: Sequence[str] = ()  # names of models that may come later
    read: Read | None = None  # reads such a model


class Requests:
    """Implements `gateway.request.spec.Generations` over the bus."""

    def __init__(
        self,
        bus: Bus,
        store: PlacementStore,
        peers: Peers,
        settings: OwnerSettings,
        models: OwnModels,
        *,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        own = {name: Own(tokenizer=tokenizer.fingerprint) for name, tokenizer in models.tokenizers.items()}
        self._agreement = Agreement(peers, {**own, **models.known}, models.incumbents)
        self._pooling = pooling = models.pooling
        pooled = {} if pooling is None else {name: one.tokenizer.facts for name, one in pooling.models.items()}
        self.catalogue = Catalogue(
            models.tokenizers,
            self._agreement,
            models.aliases,
            pooled,
            models.patterns,
            num_pooling=self._num_pooling,
        )
        self._settings = settings
        self.hosts = Hosts(
            lambda model: bool(self.catalogue.fingerprint(model)) or (pooling is not None and pooling.is_ready(model)),
            bus,
            gateway_id=settings.gateway_id,
            keep_s=settings.keep_s,
            called={name: own.called for name, own in models.known.items() if own.called},
            running=lambda: self.rooms.active,
            clock=clock,
        )
        gateway_id, limits = settings.gateway_id, settings.limits
        self._leaves = ""  # the reason, once it is leaving
        self._loops: list[asyncio.Task[None]] = []
        self.seen = Seen(running=Running(), pulse=Pulse(), suspects=Suspects(), peers=peers)
        self.means = Means(
            bus=bus,
            placer=Placer(store=store, agreement=self._agreement, cut_over_tokens=limits.cut_over_tokens),
            orders=Orders(bus, peers, gateway_id=gateway_id),
        )
        spans = RequestSpans(tracer or NoTracer(), gateway_id)
        records = Records(spans=spans, levels=settings.levels, clock=clock)
        self.keeping = Keeping(records=records, counters=Counter(), background=Background(), clock=clock)
        groups = self.seen, self.means, self.keeping
        self._newcomers = None
        if models.read is not None:
            mine = self.catalogue, self._agreement, self.hosts
            self._newcomers = Newcomers(*mine, self.keeping.background, models.read, pooling)
        self.capacities = Fleet(self.means.placer, gateway_id=gateway_id, local=limits.cut_over_tokens < 0)
        self.rooms = WaitingRooms(self._room_for)
        weights = self.catalogue.fingerprint
        self.attempts = Attempts(*groups, self.rooms, gateway_id=gateway_id, weights=weights)
        losses = Losses(self.seen, self.keeping, self.attempts, self.capacities)
        self.inbox = Inbox(*groups, self.attempts, losses, self.rooms, self.capacities)
        self._watchdog = Watchdog(*groups, self.attempts, Probes(*groups, self.attempts, losses), self.rooms)

    def _room_for(self, model: str) -> WaitingRoom:
        def capacity() -> Capacity:
            weights = self.catalogue.fingerprint(model)
            return self.capacities.capacity(self.seen.running, model=model, weights=weights)

        def started() -> list[ActiveRequest]:
            return [one for one in self.seen.running if one.state.spec.model == model]

        work, clock = self.means.placer.uncached_tokens, self.keeping.clock
        preempt = self.attempts.preempt
        return WaitingRoom(self._settings.limits, capacity, work=work, started=started, preempt=preempt, clock=clock)

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Subscribe to workers; from now on requests can be submitted."""
        inbox, background = self.inbox, self.keeping.background
        here, anybody = self._settings.gateway_id, subjects.ANY
        await self.means.bus.serve(subjects.gateway(here, anybody), to_gateway_decoder, inbox.answer)
        await self.means.bus.subscribe(subjects.frames(here, anybody), frame_decoder, inbox.take_frame)
        await self.means.bus.serve(subjects.gateway(here), to_gateway_decoder, inbox.answer_unnamed)
        await self.means.bus.subscribe(subjects.frames(here), frame_decoder, inbox.take_unnamed)
        await self.means.bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self.capacities.saw)
        inbox.listen()
        await self.means.bus.subscribe(subjects.host_heartbeat(anybody), host_state_decoder, self._saw_host)
        heartbeat = Heartbeat(self.means.bus, self.seen.running, self.rooms, self.keeping.records, self.hosts)
        loops = (heartbeat.run(here, self._settings.incarnation), self._watchdog.run(), self._tell_differences())
        self._loops = [background.spawn(loop) for loop in loops]

    def _saw_host(self, state: HostState) -> None:
        if not self.hosts.heard:  # no request of a Baton without hosts waits for one
            self.seen.peers.on_joined(lambda _: self.hosts.changed())
            self.seen.peers.on_changed(lambda _: self.hosts.changed())
        self.hosts.saw(state)
        if self._newcomers is not None:
            self._newcomers.saw(state)

    async def _tell_differences(self) -> None:
        while True:
            await asyncio.sleep(TELL_PERIOD_S)
            self._agreement.tell()
            if self._newcomers is not None:
                self._newcomers.look()

    async def drain(self, timeout_s: float, *, why: str = "the gateway is shutting down") -> None:
        """Stop admitting, let running requests finish, and after `timeout_s` end them with an error that gives the reason."""
        self._leaves = why
        give_up_at = self.keeping.clock() + timeout_s
        while (self.seen.running or self.rooms.in_flight) and self.keeping.clock() < give_up_at:
            await asyncio.sleep(DRAIN_CHECK_S)
        self.rooms.refuse_all(UnavailableError(self.not_ready_reason))
        for request in self.seen.running:
            self.attempts.end(request, UnavailableError(why), cancel="gateway drained")

    async def close(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await self.keeping.background.settle(CLOSE_TIMEOUT_S)
        await self.means.placer.releases.close()

    # -- what HTTP sees ------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self.rooms.in_flight

    @property
    def waiting(self) -> Mapping[str, tuple[int, int]]:
        return self.rooms.waiting

    @property
    def counters(self) -> Counter[str]:
        return sum((Counter(load.counters) for load in self.loads.values()), Counter[str]())

    @property
    def loads(self) -> dict[str, Load]:
        names = self.catalogue.names or ("",)
        return {name: self._load(name, is_first=name == names[0]) for name in names}

    def _load(self, model: str, *, is_first: bool) -> Load:
        """The load of a model. `is_first`: figures without a model count as this one's."""
        counters = self.rooms.counters(model)
        for event, count in self.keeping.counters.items():
            if event.model == model or (is_first and not event.model):
                counters[event.name] += count
        if is_first:
            counters |= Counter(forged_messages=self.means.bus.forged, malformed_messages=self.means.bus.malformed)
        room = self.rooms.of(model)
        return Load(in_flight=room.in_flight, waiting=room.waiting, counters=counters)

    @property
    def timelines(self) -> Timelines:
        return self.keeping.records.timelines

    def fleet(self) -> list[WorkerState]:
        return list(self.seen.peers.states.values())

    @property
    def ready_workers(self) -> dict[str, int]:
        found: dict[str, int] = {role: len(self.means.placer.workers(role)) for role in (Role.PREFILL, Role.DECODE)}
        return found | ({Role.POOL: self._num_pooling()} if self.catalogue.pooled else {})

    def _num_pooling(self, name: str = "") -> int:
        """Ready workers of one model that pools, or of all."""
        return 0 if self._pooling is None else self._pooling.num_ready_of(name)

    @property
    def differences(self) -> list[Difference]:
        return self._agreement.differences()

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        if self._leaves:
            return self._leaves
        if not self.means.bus.connected:
            return "no connection to NATS"
        names = self.catalogue.names
        pooled = self.catalogue.pooled
        takes_any = not names and not pooled
        if any(map(self.catalogue.fingerprint, names)) or (takes_any and self._agreement.ready(Role.DECODE)):
            return ""
        if self._num_pooling() or self.hosts.offers_any(self.catalogue.own_names):
            return ""
        wanted = [role for role, here in ((Role.DECODE, not pooled or names), (Role.POOL, pooled)) if here]
        return _nobody(f"no {' or '.join(wanted)} worker", self.differences)

    def turn_away(
        self, tenant: Tenant, *, priority: int, first_token_s: float = math.inf, model: str | None = None
    ) -> None:
        if self.not_ready_reason:
            raise UnavailableError(self.not_ready_reason)
        names = self.catalogue.names or ("",)
        if model is None and (len(names) > 1 or (self.hosts.heard and self.hosts.find(names[0]) is not None)):
            return  # it may be another model, or one to be loaded
        name = names[0] if model is None else model
        self._check_model(name, self.catalogue.fingerprint(name))
        self.rooms.turn_away(name, tenant, priority=priority, first_token_s=first_token_s)

    def _check_model(self, name: str, weights: str) -> None:
        """Raise UnavailableError while nobody decodes the model."""
        if name and not (weights and self.means.placer.workers(Role.DECODE, weights)):
            differences = [one for one in self.differences if one.model == name]
            raise UnavailableError(_nobody(f"no decode worker of model {name!r}", differences))

    async def submit(self, specs: Sequence[GenerationSpec]) -> list[ActiveRequest]:
        received = self.keeping.clock()
        for spec in specs:
            self._check(spec)
        lines = [timeline_of(spec, received) for spec in specs]
        for line in lines:
            line.ahead = self.rooms.of(line.model).queued_requests
        with self.timelines.waiting(lines):
            waited_s = await self.rooms.enter(specs)
            begun: list[ActiveRequest] = []
            try:
                for spec, line in zip(specs, lines, strict=True):
                    begun.append(await self.attempts.begin(spec, line, waited_s))
            except BaseException:
                for request in begun:
                    self.attempts.end(request, None, cancel="not all choices could start")
                for spec in specs:
                    self.rooms.ended(spec, 0)
                raise
        return begun

    def _check(self, spec: GenerationSpec) -> None:
        """Raise ServingError if the request can't be served, however long it waits."""
        if self.not_ready_reason:
            raise UnavailableError(self.not_ready_reason)
        if spec.deadline_s <= 0:
            raise DeadlineExceededError("the deadline has passed")
        self._check_model(spec.model, spec.model_fingerprint)
        limit = longest(self.means.placer.workers(Role.DECODE, spec.model_fingerprint))
        if limit is not None and len(spec.token_ids) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(spec.token_ids)} tokens, the context {limit}", param="prompt"
            )
        self.seen.running.refuse_twin(spec.request_id)


def _nobody(who: str, differences: Sequence[Difference]) -> str:
    """Return why nobody decodes. Clients read it; workers' names are for `/ready`."""
    unlike = sorted({str(one.what) for one in differences if one.decodes})
    if not unlike:
        return f"{who} is ready"
    return f"{who} agrees with this gateway ({', '.join(unlike)}): GET /ready says which differ, and the remedy"
