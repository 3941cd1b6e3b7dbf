"""One run: gateways, workers and clients made of the real classes, in one loop, with the faults of one seed.

`play(seed)` runs it and raises `Violation` when an invariant of the handoff did not hold.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

import decode.role
from common.errors import DeadlineExceededError, ServingError
from common.messages import SamplingParams
from gateway.admission import supply
from gateway.request.spec import GenerationSpec, Origin
from gateway.tenants.tenants import Tenant
from prefill.stop import Stop
from tests.fakes.reading import events_of
from tests.simulation.answers import Answers
from tests.simulation.bus import Network
from tests.simulation.clock import EndlessError, Process, VirtualLoop, monotonic_is
from tests.simulation.drafts import bound_drafts
from tests.simulation.forms import FREE, LEAST_CONTEXT, VOCAB, Form
from tests.simulation.logs import errors_are_violations
from tests.simulation.nodes import GatewayNode, WorkerNode
from tests.simulation.store import Ledger
from tests.simulation.transport import Fabric, SimTransport
from tests.simulation.weather import Weather
from worker.pulls.puller import FIRST_LEASE

SLACK_S = 1.5  # past its deadline a request may end: the gateway looks each 0.1 s, and its own calls have time-outs
REST_S = 17.0  # in calm, everything is given back by then: also charges that nobody releases
CROWDED_DEADLINE_S, CROWDED_REST_S = 24.0, 30.0
RIVALS = 3  # of the crowded seeds, one of so many has two tenants with long answers that take each other's places
PULLS = 4  # in one of so many seeds prompts are pulled from peers
RIVALS_RUN_S = 0.05  # instead of a second: passes take a few milliseconds
HELD_S = 5.0  # in calm, and all requests and pushes over: no process holds anything of them any more
FAIR_REST_S = 2.5  # where nothing goes wrong, everybody is told at once; less than `KEEP_ENDED_S`
PATIENT_S = 8.0  # in calm, a request with so much time left gets its answer
KEEP_ENDED_S = 3.0  # instead of `decode.role`'s half minute: seeds end sooner


class Violation(AssertionError):
    """An invariant did not hold."""


@dataclass(kw_only=True, eq=False)
class Client:
    """One request and what came of it."""

    name: str
    gateway: GatewayNode
    spec: GenerationSpec
    starts_at: float
    leaves_at_step: int | None  # cancels at this step of its request
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    end: str = ""  # "complete", "left", or the error's code
    ended_at: float = 0.0
    steps: int = 0
    generation: Any = None

    @property
    def deadline_at(self) -> float:
        return self.starts_at + self.spec.deadline_s


class World:
    """Everything of one run."""

    def __init__(self, seed: int, *, form: Form = FREE, log: Callable[[str], None] | None = None) -> None:
        self.seed, self.form, self.is_crowded = seed, form, form.crowds(seed)
        self.parts = form.parts(seed)
        self.answers = Answers(self.parts, form)
        self.log = log
        self.random = dice = random.Random(seed)
        self.loop = VirtualLoop()
        self.loop.executor_delay = lambda: dice.uniform(0.0001, 0.003)
        self.faults: Counter[str] = Counter()
        self.weather = Weather(dice=dice) if form.is_fair else Weather.draw(dice)
        self.network = Network(self.loop, self.weather, self.faults, self.note)
        self.ledger = Ledger(self.loop, self.weather, self.faults)
        if seed % PULLS == 1:
            self.ledger.holders = random.Random(seed)  # dice of its own: other seeds stay as they were
        self.fabric = Fabric(self.loop, self.weather, self.faults, self.landing)
        self.one_sided = dice.random() < 0.6
        self.violations: list[str] = []
        self.workers: list[WorkerNode] = self._draw_workers()
        self.gateways = [GatewayNode(self, f"g{n}") for n in range(dice.choice([1, 1, 2]))]
        self.clients: list[Client] = self._draw_clients()
        self._lengthen(random.Random(seed))
        self.following: list[Client] = []
        if form.stream:
            self._make_stream(random.Random(seed))
        self.is_rivalry = self.is_crowded and not form.stream and seed % RIVALS == 0
        if self.is_rivalry:
            self._make_rivals(random.Random(seed))  # dice of its own: the rest of the seed stays as it was
        self.by_name = {client.name: client for client in [*self.clients, *self.following]}
        bound_drafts(self)
        self.calm_at = dice.uniform(0.8, 4.0)
        self.hurt_at = 0.0  # the last kill, or end of a cut: both happen in calm, too
        self._schedule_faults()

    # -- what is drawn -----------------------------------------------------------------------------------------------

    def _draw_workers(self) -> list[WorkerNode]:
        return [WorkerNode(self, *drawn) for drawn in self.form.drawn_workers(self.random)]

    def _draw_clients(self) -> list[Client]:
        dice = self.random
        stems = [[dice.randrange(VOCAB) for _ in range(12)] for _ in range(2)]
        clients = []
        for number in range(self.form.stream or dice.choice([8, 10, 12] if self.is_crowded else [2, 3, 4])):
            stem = dice.choice(stems)[: dice.choice([0, 8, 12])]
            tail = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 8))]
            name = f"r{number}"
            spec = GenerationSpec(
                request_id=name,
                token_ids=stem + tail,
                sampling=SamplingParams(
                    max_tokens=dice.randint(1, 9),
                    temperature=dice.choice([0.0, 1.0]),
                    seed=dice.randrange(1000),
                    stop_token_ids=[dice.randrange(VOCAB) for _ in range(dice.choice([0, 0, 3]))],
                ),
                deadline_s=dice.choice([3.0, *[CROWDED_DEADLINE_S] * 3] if self.is_crowded else [0.5, 3.0, 14.0, 14.0]),
                priority=dice.choice([0, 0, 1]),
            )
            leaves = dice.randint(1, 40) if dice.random() < 0.25 else None
            starts = 0.3 + dice.choice([0.0, dice.uniform(0.0, 0.6)])
            clients.append(
                Client(
                    name=name, gateway=dice.choice(self.gateways), spec=spec, starts_at=starts, leaves_at_step=leaves
                )
            )
        return clients

    def _lengthen(self, dice: random.Random) -> None:
        for number, client in enumerate(self.clients):
            num_tokens, most = self.form.lengths(dice, number)
            if num_tokens:
                known, sampling = client.spec.token_ids, msgspec.structs.replace(client.spec.sampling, max_tokens=most)
                token_ids = [*known, *(dice.randrange(VOCAB) for _ in range(num_tokens))][:num_tokens]
                client.spec = replace(client.spec, token_ids=token_ids, sampling=sampling)
            if self.form.deadline_s:
                client.spec = replace(client.spec, deadline_s=self.form.deadline_s)

    def _make_stream(self, dice: random.Random) -> None:
        """Small ones fill the pools, then the large one comes; from then on a small one follows each that ends."""
        for client in self.clients:
            client.starts_at = dice.uniform(0.3, 0.5)
            client.leaves_at_step = None
            client.spec = replace(client.spec, priority=0, deadline_s=CROWDED_DEADLINE_S)
        self.clients[0].starts_at = 0.7
        at_once = 1 + self.form.abreast
        self.clients, self.following = self.clients[:at_once], self.clients[at_once:]

    def _make_rivals(self, dice: random.Random) -> None:
        for client in self.clients:
            sampling = msgspec.structs.replace(
                client.spec.sampling, max_tokens=dice.randint(2, LEAST_CONTEXT - len(client.spec.token_ids))
            )
            tenant = Tenant(name=dice.choice(["few", "many", "many"]), weight=dice.choice([1.0, 2.0]))
            priority = dice.choice([-1, 0, 0, 0, 1])
            client.spec = replace(client.spec, sampling=sampling, origin=Origin(tenant), priority=priority)

    def _schedule_faults(self) -> None:
        dice, loop = self.random, self.loop
        loop.call_later(0.29, setattr, self.weather, "is_calm", False)
        loop.call_later(self.calm_at, self._calm)
        if self.weather.is_fair:
            return
        for node in self.workers:
            if dice.random() < 0.2:
                node.dies_at_step = dice.randint(1, 60)
                node.comes_back_s = dice.choice([None, 0.05, 0.5, 3.5])
            if dice.random() < 0.08:
                self._cut(node, dice)
        for gateway in self.gateways:
            if dice.random() < 0.05:
                gateway.dies_at_step = dice.randint(1, 80)
            elif dice.random() < 0.08:
                self._cut(gateway, dice)
            if dice.random() < 0.06:
                gateway.mute_beats = True
        if self.seed % 3 == 0:
            self._schedule_switches(random.Random(self.seed))  # dice of its own: the rest of the seed stays as it was
        if dice.random() < 0.15:
            begin = dice.uniform(0.3, 1.0)
            self.weather.store_down = (begin, min(self.calm_at, begin + dice.uniform(0.1, 2.0)))

    def _schedule_switches(self, dice: random.Random) -> None:
        """Roles go to and fro until it is calm; then each worker has those that it began with."""
        for node in self.workers:
            for _ in range(dice.choice([0, 1, 3, 8])):
                roles = dice.choice([["decode"], ["prefill"], ["decode", "prefill"]])
                self.loop.call_later(dice.uniform(0.25, self.calm_at), node.switch, roles)
            self.loop.call_later(self.calm_at, node.switch, node.roles)

    def _cut(self, node: WorkerNode | GatewayNode, dice: random.Random) -> None:
        begin, seconds = dice.uniform(0.3, 1.2), dice.choice([0.3, 2.0, 3.8, 6.0])
        if self.seed % 2:
            self.loop.call_later(begin, node.hold, seconds)
            return
        self.loop.call_later(begin, node.cut)
        self.loop.call_later(begin + seconds, node.mend)

    def _calm(self) -> None:
        self.weather.is_calm = True
        for gateway in self.gateways:
            gateway.mute_beats = False
        self.tell("-- calm --")

    # -- what happens ----------------------------------------------------------------------------------------------------

    def note(self, process: Process, what: str, message: msgspec.Struct) -> None:
        """A message begins its way, or is taken. This is where processes die and clients leave, step by step."""
        name = getattr(message, "request_id", "") or getattr(getattr(message, "job", None), "request_id", "")
        entries = getattr(message, "tokens", None)
        if entries:
            name = entries[0].request_id
        if not name:
            return
        if self.log is not None:
            self.tell(f"{process.name:>3} {what:<6} {message}")
        client = self.by_name[name]
        client.steps += 1
        if client.steps == client.leaves_at_step:
            client.gateway.process.at(0.0, self._leave, client)
        process.step()

    def _leave(self, client: Client) -> None:
        if client.generation is not None and not client.end:
            self.faults["client left"] += 1
            self.tell(f"{client.name} leaves")
            client.generation.cancel("client")

    def landing(
        self, near: SimTransport, far: SimTransport, lease_id: int, generation: int, origin: int, block: int
    ) -> None:
        """A write lands in `block` of a live worker: it must be the lease's, and nobody else's."""
        node = far.node
        tables = (node.intake.reservations._table, node.puller.table)
        lease = next((table._leases[lease_id] for table in tables if lease_id in table._leases), None)
        where = f"a write under lease {lease_id} lands in block {block} of {far.process.name}"
        if lease is None or lease.generation != generation:
            self.violate(f"{where}: the lease is over")
        elif lease.state.value not in ("reserved", "quarantined"):
            self.violate(f"{where}: the lease is {lease.state.value}")
        elif block not in lease.blocks:
            self.violate(f"{where}: not the lease's")
        elif node.pool._references[block] != 1 or node.pool._digests[block] is not None:
            self.violate(f"{where}: others hold it")
        if origin >= 0 and near.node.pool._references[origin] < 1:
            self.violate(f"{where} from block {origin}, which its writer gave back")
        self.faults["landed for a pull"] += lease is not None and lease.lease_id >= FIRST_LEASE
        self.faults["landed in quarantine"] += lease is not None and lease.state.value == "quarantined"

    def violate(self, text: str) -> None:
        """Book a violation; the run goes on."""
        self.violations.append(f"{self.loop.now:.3f}: {text}")
        self.tell(f"!! {text}")

    def tell(self, text: str) -> None:
        """One line of a replay's log."""
        if self.log is not None:
            self.log(f"{self.loop.now:9.4f} {text}")

    # -- a run -------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From the start of all processes until nothing of the requests is left anywhere."""
        for node in [*self.gateways, *self.workers]:
            node.start()
        for client in self.clients:
            client.gateway.process.at(client.starts_at, self._submit, client)
        await asyncio.sleep(max(client.starts_at for client in self.clients))
        while not self._all_ended() and self.loop.now < max(client.deadline_at for client in self.clients) + SLACK_S:
            await asyncio.sleep(0.05)
        rest_s = FAIR_REST_S if self.weather.is_fair else CROWDED_REST_S if self.is_crowded else REST_S
        for gateway in self.gateways:
            self.faults["preempted"] += gateway.requests.counters["preemptions"]
        await self._rest(max(self.loop.now, self.calm_at) + rest_s)
        self._check_clients()

    def _submit(self, client: Client) -> None:
        client.gateway.process.run(self._serve(client))

    async def _serve(self, client: Client) -> None:
        try:
            [client.generation] = await client.gateway.requests.submit([client.spec])
            async for event in events_of(client.generation):
                if event.position != len(client.tokens):
                    self.violate(f"{client.name} got position {event.position} after {len(client.tokens)} tokens")
                client.tokens += event.token_ids
                client.finish = event.finish
            client.end = "complete" if client.finish else "left"
        except ServingError as error:
            client.end = error.code
            self.tell(f"{client.name} ends: {error.code}: {error.message}")
        client.ended_at = self.loop.now
        if self.following and not self.clients[0].end:
            self._follow(self.following.pop())

    def _follow(self, client: Client) -> None:
        client.starts_at = self.loop.now
        self.clients.append(client)
        self._submit(client)

    def _all_ended(self) -> bool:
        return all(client.end or not client.gateway.process.alive for client in self.clients)

    async def _rest(self, until: float) -> None:
        """Wait until everything was given back."""
        held_until = self.loop.now + HELD_S
        while self.loop.now < until:
            is_quiet = self.loop.now >= self.calm_at and self._all_restarted()
            if is_quiet and not self.remains():
                return
            held_until = max(held_until, HELD_S + max(self.calm_at, self.hurt_at, self.fabric.pushed_at))
            if is_quiet and self.loop.now > held_until and self.held():
                break
            await asyncio.sleep(0.1)
        for what in self.remains():
            self.violate(f"left behind: {what}")

    def _all_restarted(self) -> bool:
        return not any(node.is_coming_back or node.is_cut for node in [*self.workers, *self.gateways])

    def held(self) -> list[str]:
        """What of the requests live processes still have."""
        return [f"{node.name}: {what}" for node in [*self.workers, *self.gateways] for what in node.remains()]

    def remains(self) -> list[str]:
        """What of the requests is still somewhere, on live processes and in what they share."""
        found = self.held()
        live = {node.name for node in self.workers if node.process.alive}
        found += [
            f"job {job.number} for {job.worker}" for job in self.network.jobs.stored.values() if job.worker in live
        ]
        dead_gateways = [gateway for gateway in self.gateways if not gateway.process.alive]
        self.ledger.strict &= not dead_gateways and self.weather.store_down == (0.0, 0.0)
        found += [f"charge {charge}" for charge in self.ledger.charges()]
        if self.network.on_way or self.fabric.in_flight:
            found.append("messages or blocks on their way")
        return found

    def _check_clients(self) -> None:
        if self.form.stream and not self.following:
            self.violate(f"{self.form.stream} small requests went before {self.clients[0].name}, which is large")
        for client in self.clients:
            if not client.gateway.process.alive:
                continue
            if not client.end:
                self.violate(f"{client.name} never ended")
                continue
            self._check_answer(client)
            if client.ended_at > client.deadline_at + SLACK_S:
                self.violate(f"{client.name} ended {client.ended_at - client.deadline_at:.2f} s past its deadline")
            self.faults[f"ended {client.end}"] += 1

    def _check_answer(self, client: Client) -> None:
        sampling, expected = client.spec.sampling, self.answers.of(client.spec)
        if client.tokens != expected[: len(client.tokens)]:
            self.violate(f"{client.name} got {client.tokens}, expected {expected}")
        if client.end == "complete":
            finish = "stop" if expected[-1] in sampling.stop_token_ids else "length"
            if client.tokens != expected or client.finish != finish:
                self.violate(f"{client.name} got {client.tokens} {client.finish}, expected {expected} {finish}")
        has_decoder = any(node.process.alive for node in self.workers if "decode" in node.roles)
        waits_s = client.spec.aim.first_token_s or client.spec.deadline_s
        calm_s = waits_s - max(0.0, self.calm_at - client.starts_at, self.hurt_at - client.starts_at)
        attempts = client.generation.timeline.attempts if client.generation is not None else []
        if self.weather.is_fair and any(Stop.LEASE_ABORTED.text in attempt.outcome for attempt in attempts):
            self.violate(f"{client.name} was computed again: its lease ended under a writer that lives")
        if client.end == DeadlineExceededError.code and calm_s > PATIENT_S and has_decoder:
            self.violate(f"{client.name} had {calm_s:.1f} calm seconds and got no answer")

    def failures(self, context: dict[str, Any]) -> None:
        """What the loop could not deliver to anybody."""
        self.violate(f"{context.get('message')}: {context.get('exception')!r}")


def play(seed: int, *, form: Form = FREE, log: Callable[[str], None] | None = None) -> World:
    """Run one seed; raise Violation, naming it, if something did not hold."""
    world = World(seed, form=form, log=log)
    run_world(world)
    return world


def run_world(world: World) -> None:
    """Run a world to its end in its own time; raise Violation if something did not hold."""
    loop, form = world.loop, world.form
    loop.set_exception_handler(lambda _, context: world.failures(context))
    kept, decode.role.KEEP_ENDED_S = decode.role.KEEP_ENDED_S, KEEP_ENDED_S
    run_s = supply.MIN_RUN_S
    if world.is_rivalry:
        supply.MIN_RUN_S = RIVALS_RUN_S
    try:
        with monotonic_is(loop), errors_are_violations(world), form.checkpoints():
            try:
                loop.run_until_complete(world.run())
            except EndlessError as error:
                world.violate(str(error))
            finally:
                loop.abandon()
    finally:
        decode.role.KEEP_ENDED_S, supply.MIN_RUN_S = kept, run_s
    if world.violations:
        raise Violation(f"seed {world.seed}:\n  " + "\n  ".join(world.violations[:12]))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Cycles are collected between runs, not in them: finalizers then meet no living world, and it is faster.

    What is loaded is no part of them; looking through it each time would take most of that.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
