"""Which part of the owner is handed which others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from common.bus import Bus
from common.peers import Peers
from common.tracing import Tracer
from gateway.admission.capacity import Fleet
from gateway.admission.policy import RequestLimits
from gateway.admission.rooms import WaitingRooms
from gateway.admission.supply import Capacity
from gateway.admission.waiting_room import WaitingRoom
from gateway.lifecycle.attempts import Attempts
from gateway.lifecycle.background import Background
from gateway.lifecycle.inbox import Inbox
from gateway.lifecycle.losses import Losses
from gateway.lifecycle.outbox import Heartbeat, Orders
from gateway.lifecycle.probes import Probes
from gateway.lifecycle.pulse import Pulse
from gateway.lifecycle.records import Event, Records
from gateway.lifecycle.running import Running
from gateway.lifecycle.suspects import Suspects
from gateway.lifecycle.watchdog import Watchdog
from gateway.observe.attainment import ServiceLevels
from gateway.observe.spans import RequestSpans
from gateway.placement.agreement import Agreement
from gateway.placement.placer import PlacementStore, Placer
from gateway.request.active import ActiveRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What `gateway.lifecycle.requests.Requests` stands on."""

    running: Running
    background: Background
    counters: Counter[Event]
    placer: Placer
    fleet: Fleet
    rooms: WaitingRooms
    records: Records
    pulse: Pulse
    attempts: Attempts
    inbox: Inbox
    watchdog: Watchdog
    heartbeat: Heartbeat


def assemble(
    *,
    bus: Bus,
    store: PlacementStore,
    peers: Peers,
    agreement: Agreement,
    gateway_id: str,
    incarnation: int,
    limits: RequestLimits,
    levels: ServiceLevels,
    tracer: Tracer,
    weights: Callable[[str], str],
    clock: Callable[[], float],
) -> Parts:
    """Make the parts, without starting anything. `weights`: see `Catalogue.fingerprint`."""
    running, background, counters = Running(), Background(), Counter[Event]()
    suspects, pulse, orders = Suspects(), Pulse(), Orders(bus, peers, gateway_id=gateway_id)
    placer = Placer(store=store, agreement=agreement, cut_over_tokens=limits.cut_over_tokens)
    fleet = Fleet(placer, gateway_id=gateway_id, local=limits.cut_over_tokens < 0)

    def room_for(model: str) -> WaitingRoom:
        def capacity() -> Capacity:
            return fleet.capacity(running, model=model, weights=weights(model))

        def started() -> list[ActiveRequest]:
            return [one for one in running if one.state.spec.model == model]

        def preempt(request: ActiveRequest, until: asyncio.Future[None]) -> None:
            attempts.preempt(request, until)

        work = placer.uncached_tokens
        return WaitingRoom(limits, capacity, work=work, started=started, preempt=preempt, clock=clock)

    rooms = WaitingRooms(room_for)
    records = Records(spans=RequestSpans(tracer, gateway_id, levels), levels=levels, clock=clock)
    attempts = Attempts(
        gateway_id=gateway_id,
        running=running,
        bus=bus,
        peers=peers,
        placer=placer,
        orders=orders,
        suspects=suspects,
        rooms=rooms,
        records=records,
        background=background,
        counters=counters,
        weights=weights,
        clock=clock,
    )
    losses = Losses(
        running=running, attempts=attempts, peers=peers, suspects=suspects, pulse=pulse, fleet=fleet, clock=clock
    )
    inbox = Inbox(
        bus=bus,
        running=running,
        attempts=attempts,
        losses=losses,
        peers=peers,
        orders=orders,
        suspects=suspects,
        pulse=pulse,
        rooms=rooms,
        fleet=fleet,
        background=background,
        counters=counters,
        clock=clock,
    )
    probes = Probes(
        bus=bus,
        peers=peers,
        orders=orders,
        attempts=attempts,
        losses=losses,
        suspects=suspects,
        pulse=pulse,
        background=background,
        counters=counters,
        clock=clock,
    )
    watchdog = Watchdog(
        bus=bus,
        peers=peers,
        running=running,
        attempts=attempts,
        probes=probes,
        pulse=pulse,
        placer=placer,
        rooms=rooms,
        background=background,
        clock=clock,
    )
    return Parts(
        running=running,
        background=background,
        counters=counters,
        placer=placer,
        fleet=fleet,
        rooms=rooms,
        records=records,
        pulse=pulse,
        attempts=attempts,
        inbox=inbox,
        watchdog=watchdog,
        heartbeat=Heartbeat(
            bus=bus, gateway_id=gateway_id, incarnation=incarnation, running=running, rooms=rooms, records=records
        ),
    )
