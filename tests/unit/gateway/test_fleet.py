"""What admission sees: heartbeats of workers and gateways, and what this gateway sent that they don't tell yet."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from common.messages import GatewayState, KVLayout, Region, SamplingParams, WorkerState
from common.peers import Incarnation, Peers
from common.words import WorkerStatus
from gateway.admission.capacity import HEARTBEAT_LAG_S, SILENT_S, Fleet, HeardGateways
from gateway.admission.policy import RequestLimits
from gateway.admission.supply import MIN_RUN_S, Held
from gateway.admission.waiting_room import WaitingRoom
from gateway.placement.agreement import Agreement
from gateway.placement.placer import Placer
from gateway.request.active import ActiveRequest
from gateway.request.spec import GenerationSpec, Origin
from gateway.request.state import Phase, RequestState
from gateway.tenants.tenants import Tenant
from tests.fakes.ledger import MemoryLedger

LAYOUT = KVLayout(num_blocks=1, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")


def worker(name: str, role: str, *, rate: float, queued: int = 0) -> WorkerState:
    return WorkerState(
        worker=name, incarnation=1, roles=[role], status=WorkerStatus.READY, model="m", model_fingerprint="m",
        tokenizer_fingerprint="t", vocab_size=10, max_model_len=100,
        region=Region(transport="shm", incarnation=1, layout=LAYOUT, address={}),
        prefill_tokens_per_s=rate, local_tokens_per_s=rate, queued_tokens=queued,
    )  # fmt: skip


@pytest.fixture
def peers() -> Peers:
    peers = Peers()
    for state in (worker("p", "prefill", rate=100.0, queued=7), worker("d", "decode", rate=10.0)):
        peers.saw(state)
    return peers


def fleet(peers: Peers, *, local: bool = True) -> Fleet:
    placer = Placer(store=MemoryLedger(), agreement=Agreement(peers), cut_over_tokens=0)
    return Fleet(placer, gateway_id="here", local=local)


def request(
    phase: Phase,
    *,
    assigned: str = "p",
    claimed_s_ago: float | None = None,
    work: int = 50,
    name: str = "r",
    tenant: str = "default",
) -> ActiveRequest:
    spec = GenerationSpec(
        request_id=name, token_ids=[1] * work, sampling=SamplingParams(max_tokens=1), deadline_s=9.0,
        origin=Origin(Tenant(name=tenant)),
    )  # fmt: skip
    state = RequestState(spec=spec, deadline_at=9.0, phase=phase, assigned=assigned)
    active = ActiveRequest(state, 0.0, None)  # type: ignore[arg-type]
    active.claimed_at = None if claimed_s_ago is None else time.monotonic() - claimed_s_ago
    return active


@pytest.mark.parametrize(
    ("phase", "facts", "queued", "unplaced"),
    [
        (Phase.QUEUED, {}, 57, 0),  # no worker says so yet
        (Phase.QUEUED, {"assigned": ""}, 7, 50),  # it is being placed
        (Phase.CLAIMED, {"claimed_s_ago": -60.0}, 57, 0),
        (Phase.CLAIMED, {"claimed_s_ago": HEARTBEAT_LAG_S + 1}, 7, 0),  # the worker's heartbeat has it
        (Phase.PREFILLED, {"claimed_s_ago": 1.0}, 7, 0),
        (Phase.DECODING, {"claimed_s_ago": 1.0}, 7, 0),
    ],
)
def test_what_was_sent_counts_once(
    peers: Peers, phase: Phase, facts: dict[str, Any], queued: int, unplaced: int
) -> None:
    sent = request(phase, **facts)
    capacity = fleet(peers).capacity([sent])
    assert [one.queued_tokens for one in capacity.workers] == [queued, 0]
    assert capacity.unplaced_tokens == unplaced
    assert capacity.tokens_per_s == 110.0
    assert fleet(peers, local=False).capacity([sent]).tokens_per_s == 100.0


def test_what_is_ours_leaves_a_worker_with_its_first_token_and_not_with_the_next_heartbeat(peers: Peers) -> None:
    claimed = [request(Phase.CLAIMED, claimed_s_ago=1.0) for _ in range(3)]
    peers.saw(worker("p", "prefill", rate=100.0, queued=150 + 40))  # 40 tokens are another gateway's
    seen = fleet(peers)
    assert seen.capacity(claimed).workers[0].queued_tokens == 190
    claimed[0].state.phase = Phase.PREFILLED
    assert seen.capacity(claimed).workers[0].queued_tokens == 140


def test_a_long_prompt_that_is_being_computed_counts_with_what_is_left_of_it(peers: Peers) -> None:
    claimed = [request(Phase.CLAIMED, claimed_s_ago=1.0, work=1000), request(Phase.CLAIMED, claimed_s_ago=1.0)]
    peers.saw(worker("p", "prefill", rate=100.0, queued=250))
    seen = fleet(peers)
    assert seen.capacity(claimed).workers[0].queued_tokens == 250
    claimed[0].state.phase = Phase.PREFILLED
    assert seen.capacity(claimed).workers[0].queued_tokens == 50


def test_other_gateways_count_while_they_are_heard(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fleet(peers)
    for name in ("here", "there", "elsewhere"):
        seen.saw(GatewayState(gateway=name, incarnation=1, waiting_tokens=5, started_tokens=30, unclaimed_tokens=20))
    capacity = seen.capacity([])
    assert (capacity.gateways, capacity.waiting_elsewhere, capacity.started_elsewhere) == (3, 10, 60)
    assert capacity.unplaced_tokens == 40
    later = time.monotonic() + SILENT_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert seen.capacity([]).gateways == 1


def test_nothing_is_kept_of_gateways_that_are_silent_even_if_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, now = HeardGateways(), time.monotonic()
    for number in range(20):
        monkeypatch.setattr(time, "monotonic", lambda at=now + number: at)
        heard.saw(GatewayState(gateway=f"g-{number}", incarnation=1))
        heard.saw(GatewayState(gateway=f"g-{number}", incarnation=1))
        assert len(heard) <= SILENT_S
    assert [state.gateway for state in heard.states()] == ["g-17", "g-18", "g-19"]


# -- a decode worker that drains -------------------------------------------------------------------------------------------


def decoder(name: str, **facts: Any) -> WorkerState:
    return msgspec.structs.replace(worker(name, "decode", rate=10.0), max_sequences=8, **facts)


class Streams:
    """A gateway's waiting room and what it started, each decoded by a worker."""

    def __init__(self, peers: Peers) -> None:
        self.now = 1000.0
        self.peers = peers
        self.running: list[ActiveRequest] = []
        self.preempted: list[ActiveRequest] = []
        self.room = WaitingRoom(
            RequestLimits(), lambda: fleet(peers).capacity(self.running), started=lambda: self.running,
            preempt=lambda request, _: self.preempted.append(request), clock=lambda: self.now,
        )  # fmt: skip

    async def start(self, name: str, at: str) -> None:
        one = request(Phase.DECODING, name=name)
        await self.room.enter([one.state.spec])
        self.now += 1.0
        one.state.decoder = Incarnation(at, 1)
        one.place.decodes(self.now)
        self.running.append(one)
        self.room.computed(one.state.spec)

    def drain(self, name: str) -> None:
        self.peers.saw(decoder(name, status=WorkerStatus.DRAINING))
        self.now += MIN_RUN_S

    def told(self) -> GatewayState:
        return GatewayState(gateway="elsewhere", incarnation=1, models={"": self.room.load(self.running)})


@pytest.fixture
def streams() -> Streams:
    peers = Peers()
    for state in (worker("p", "prefill", rate=100.0), decoder("d1"), decoder("d2")):
        peers.saw(state)
    return Streams(peers)


async def test_streams_at_a_worker_that_drains_take_nobody_s_place(streams: Streams) -> None:
    """Neither here nor at other gateways, which don't count that worker."""
    for number in range(8):
        await streams.start(f"r{number}", at="d2")
    streams.drain("d2")
    told = streams.told()
    here = fleet(streams.peers)
    here.saw(told)
    assert told.models[""].tenants["default"].held == 0
    assert here.capacity([]).places.free(Held(), 0) == 8
    for number in range(8):
        await asyncio.wait_for(streams.start(f"more{number}", at="d1"), 60)
    here.saw(streams.told())
    assert here.capacity([]).places.free(Held(), 0) == 0


async def test_streams_at_a_worker_that_drains_do_not_give_way(streams: Streams) -> None:
    """The newcomer could not have their place."""
    for number in range(16):
        await streams.start(f"r{number}", at="d1" if number < 8 else "d2")
    streams.drain("d2")
    newcomer = request(Phase.QUEUED, name="n", tenant="other").state.spec
    call = asyncio.create_task(streams.room.enter([newcomer]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert call.done()
    assert [one.state.decoder for one in streams.preempted] == [Incarnation("d1", 1)]
