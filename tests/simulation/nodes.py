"""Processes of a run: a worker or a gateway, wired as in `services`, around the simulated bus, store and transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from common import subjects
from common.messages import Frame, GatewayState, PagePart, SetRoles, Tokens
from common.peers import Peers
from decode.role import DecodeRole
from engine.config import CacheConfig, EngineConfig
from engine.engine import Chunk
from engine.fake.engine import FakeEngine
from engine.groups import MARGIN
from engine.passes import Finished, Pass
from gateway.lifecycle.requests import OwnerSettings, OwnModels, Requests
from kvtransfer.transport import Transfers
from prefill.role import PrefillRole
from tests.simulation.bus import SimBus
from tests.simulation.clock import Process
from tests.simulation.drafts import speculation_of
from tests.simulation.forms import BLOCK, VOCAB
from tests.simulation.logs import FailedPassError
from tests.simulation.store import SimStore
from tests.simulation.transport import SimTransport
from worker.device.launcher import Threads
from worker.device.step_policy import StepTargets
from worker.identity import Identity, Messenger
from worker.roles import Computed
from worker.settings import ModelIdentity, WorkerSettings
from worker.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.world import World


class SteppedProcess(Process):
    """Dies at a given step."""

    def __init__(self, world: World, node: Node) -> None:
        super().__init__(world.loop, node.name)
        self._node = node
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.alive and self.steps == self._node.dies_at_step:
            self._node.die()


class Node:
    """What survives a process: its name, and how its life goes."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dies_at_step: int | None = None
        self.comes_back_s: float | None = None
        self.is_coming_back = False
        self.is_cut = False
        self.process: SteppedProcess = SteppedProcess(world, self)
        self.bus = SimBus(world.network, self.process)

    def start(self) -> None:
        """Start a new process under this name."""
        self.is_coming_back = False
        self.process = SteppedProcess(self.world, self)
        self.bus = SimBus(self.world.network, self.process)
        self.process.run(self.main())

    async def main(self) -> None:
        raise NotImplementedError

    def remains(self) -> list[str]:
        raise NotImplementedError

    def die(self) -> None:
        """SIGKILL; perhaps it is started again."""
        self.world.faults[f"killed {type(self).__name__}"] += 1
        self.world.tell(f"{self.name} is killed")
        self.world.hurt_at = self.world.loop.now
        self.process.kill()
        self.dies_at_step = None
        if self.comes_back_s is not None:
            self.is_coming_back = True
            self.world.faults["came back"] += 1
            self.world.loop.call_later(self.comes_back_s, self.start)

    def cut(self) -> None:
        self.world.faults["cut off"] += 1
        self.world.tell(f"{self.name} is cut off")
        self.is_cut = True
        self.bus.cut()

    def mend(self) -> None:
        self.world.tell(f"{self.name} is connected again")
        self.world.hurt_at = self.world.loop.now
        self.is_cut = False
        self.bus.mend()

    def hold(self, seconds: float) -> None:
        """Everything to and from it waits for so long; it, and the others, only see silence."""
        self.world.faults["held"] += 1
        self.world.tell(f"{self.name} is held")
        self.is_cut = True
        self.bus.hold()
        self.world.loop.call_later(seconds, self._let_go, self.bus)

    def _let_go(self, bus: SimBus) -> None:
        self.world.tell(f"{self.name} is let go")
        self.world.hurt_at = self.world.loop.now
        self.is_cut = False
        bus.let_go()


class WorkerNode(Node):
    """A worker with one role or both."""

    def __init__(self, world: World, name: str, roles: list[str], num_blocks: int) -> None:
        super().__init__(world, name)
        self.roles = roles
        self.num_blocks = num_blocks
        self.worker: Worker | None = None
        self.intake: Any = None

    async def main(self) -> None:
        world, dice = self.world, self.world.random
        self.transport = transport = SimTransport(world.fabric, self.process, one_sided=world.one_sided)
        engine = WatchedEngine(self, transport)
        peers = Peers(clock=world.loop.time)
        await peers.start(self.bus)
        settings = WorkerSettings(
            served=ModelIdentity("sim", ""),
            max_batch_tokens=world.form.batch_tokens,
            max_sequences=world.form.places or dice.choice([2, 4]),
            step_targets=StepTargets(5.0 if engine.as_on_gpus else 0.0),  # many steps take longer: prompts pause
        )
        identity = Identity(self.name, dice.getrandbits(62))
        worker = Worker(
            messenger=Messenger(identity=identity, bus=self.bus, peers=peers),
            store=SimStore(world.ledger),  # type: ignore[arg-type]
            engine=engine,
            transfers=Transfers(
                transport=transport, region=await transport.open(engine.kv, engine.layout, identity.incarnation)
            ),
            settings=settings,
            threads=Threads(VirtualThread(self), VirtualThread(self)),
            end_process=self._device_broke,
        )
        self.decode = DecodeRole(worker.context, speculation=speculation_of(world, self.name))
        self.prefill = PrefillRole(worker.context, max_requests=world.form.prompts)
        self.decode.adopt = self._adopt  # type: ignore[method-assign]
        self.intake = self.decode._intake
        self.pool = worker.context.cache.pool
        self.puller: Any = worker.context.cache.puller
        self.puller._policy = {"fixed_ms": 0.0, "least_tokens": 1.0}  # prompts are short here
        transport.node = self
        for role in (self.decode, self.prefill):
            worker.attach(role, active=role.name in self.roles)
        self.worker = worker
        await worker.run(asyncio.Event())

    def _device_broke(self) -> None:
        """The worker ends its own simulated process; a supervisor starts it again."""
        self.world.faults["device broken"] += 1
        self.comes_back_s = self.comes_back_s or 0.5
        self.die()

    def _adopt(self, prompt: Computed) -> bool:
        is_adopted = DecodeRole.adopt(self.decode, prompt)
        self.world.faults["went on in place"] += is_adopted
        return is_adopted

    def switch(self, roles: list[str]) -> None:
        """Somebody tells the worker to take new work of these roles alone."""
        worker = self.worker
        if self.process.alive and worker is not None and worker.context.roles.status == "ready":
            self.world.faults["switched roles"] += 1
            self.world.tell(f"{self.name} becomes {roles}")
            spawn, handle = worker.context.background.spawn, worker.control.handle
            self.process.at(0.0, lambda: spawn(handle(SetRoles(roles=roles))))

    def remains(self) -> list[str]:
        """What of the requests is left here; nothing when the process is dead."""
        if not self.process.alive or self.worker is None:
            return []
        context, pool = self.worker.context, self.pool
        left: dict[str, Any] = {
            "held blocks": pool.num_used,
            "claimed jobs": len(context.jobs._held) + context.jobs._claiming + len(context.jobs._tasks),
            "passes": self.worker.passes_in_flight,
            "expected runs": len(self.transport.expected),
            "frames": sum(map(len, context.outbox._pending.values())),
            "tasks": _unusual(context.background.tasks, _WORKER_TASKS),
        }
        decode, intake, scheduler = self.decode, self.decode._intake, self.decode.scheduler
        left["leases"] = intake.reservations.held_blocks + len(intake.reservations)
        left["pulls"] = len(self.puller._open) + len(self.puller.prompts) + len(self.worker._lender._lending)
        left["sequences"] = len(scheduler) + scheduler.blocks.awaited + len(scheduler._in_flight)
        left["streams"] = len(decode._requests) + len(decode._local)
        prefill = self.prefill
        left["prompts"] = len(prefill._requests) + len(prefill._tasks) + len(prefill._in_flight)
        if pool.num_used == 0 and len({*pool._free, *pool.retention}) != pool.num_blocks:
            left["pool"] = "blocks are missing or there twice"
        return [f"{what}: {amount}" for what, amount in left.items() if amount]


class GatewayNode(Node):
    """A gateway without its HTTP."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.mute_beats = False
        self.requests: Requests = None  # type: ignore[assignment]

    async def main(self) -> None:
        world = self.world
        peers = Peers(clock=world.loop.time)
        await peers.start(self.bus)
        bus: Any = WatchedBus(self, self.bus)
        self.requests = Requests(
            bus,
            SimStore(world.ledger),
            peers,
            OwnerSettings(gateway_id=self.name, incarnation=world.random.getrandbits(62)),
            OwnModels(),
            clock=world.loop.time,
        )
        await self.requests.start()

    def remains(self) -> list[str]:
        if not self.process.alive:
            return []
        left = {
            "requests": len(self.requests.seen.running),
            "tasks": _unusual(self.requests.keeping.background, _GATEWAY_TASKS),
        }
        return [f"{what}: {amount}" for what, amount in left.items() if amount]


class WatchedBus:
    """The gateway's bus. Its heartbeats may be lost for a while, and frames are checked for what the gateway takes of them.

    An answer must get tokens of the current attempt only. All attempts say the same here, so no answer would show it.
    """

    def __init__(self, node: GatewayNode, bus: SimBus) -> None:
        self._node = node
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, message: Any) -> None:
        if isinstance(message, GatewayState) and self._node.mute_beats:
            self._node.world.faults["muted gateway"] += 1
            return
        await self._bus.publish(subject, message)

    async def subscribe(self, subject: str, decoder: Any, handler: Callable[[Any], None]) -> Any:
        def checked(frame: Frame) -> None:
            for tokens in frame.tokens:
                with self._checking(tokens):
                    handler(msgspec.structs.replace(frame, tokens=[tokens]))

        is_frames = subject == subjects.frames(self._node.name, subjects.ANY)
        return await self._bus.subscribe(subject, decoder, checked if is_frames else handler)

    @contextlib.contextmanager
    def _checking(self, tokens: Tokens) -> Iterator[None]:
        world, request = self._node.world, self._node.requests.seen.running.find(tokens.request_id)
        if request is None:
            yield
            return
        attempt, before = request.state.attempt, request.state.next_position
        yield
        if tokens.attempt != attempt and request.state.next_position != before:
            world.violate(f"{tokens.request_id} got tokens of attempt {tokens.attempt} in attempt {attempt}")
        world.faults["stale tokens"] += tokens.attempt != attempt


class VirtualThread:
    """An executor of one thread: work is done one after another, each at the end of the time that it takes."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node
        self._process = node.process
        self._free_at = 0.0

    def submit(self, function: Callable[..., object], /, *arguments: object) -> None:
        world = self._node.world
        self._free_at = max(self._free_at, world.loop.now) + world.random.uniform(*world.form.pass_s)
        for argument in arguments:
            if isinstance(argument, Waited):
                self._free_at += argument.takes_s
        self._process.at(self._free_at - world.loop.now, function, *arguments)

    def shutdown(self, wait: bool = True) -> None:
        """Nothing is waited for at the end of a world."""


def _blocks_beside(part: PagePart) -> int:
    """Further blocks of a pool, so that the same sequences fit: a state, or the most entries of a window that one holds."""
    return part.layers * (-(-(part.window - 1) // BLOCK) + MARGIN) if part.window else part.layers


class WatchedEngine(FakeEngine):
    """Looks whether a pass touches only blocks that are its sequences'; fails when the weather says so."""

    def __init__(self, node: WorkerNode, transport: SimTransport) -> None:
        parts = node.world.parts
        num_blocks = node.num_blocks + sum(map(_blocks_beside, parts[1:]))
        config = EngineConfig(
            model=Path("sim"),
            max_model_len=node.world.form.context,
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK),
        )
        super().__init__(config, vocab_size=VOCAB, parts=parts, sleep=None, allocate=transport.allocate)
        self.fingerprint = "sim"  # whatever the size of the pool
        self._node = node
        # A pass is waited for in another thread, its time measured.
        self.as_on_gpus = node.world.random.random() < 0.5 or node.world.form.token_s > 0

    def launch(self, chunks: list[Chunk]) -> Pass:
        node, weather = self._node, self._node.world.weather
        if node.decode.scheduler.resume_point.blocks:
            node.world.faults["held checkpoint"] += 1
        if node.worker is not None and node.worker.context.cache.turns.due:
            node.world.faults["kept blocks for one"] += 1
        leased = set[int]()
        if node.intake is not None:
            leased = {block for lease in node.intake.reservations._table._leases.values() for block in lease.blocks}
        for chunk in chunks:
            table = list[int]()
            for group, own in zip(node.pool.groups, chunk.sequence.tables, strict=True):
                first, begun, end = group.first_seen(chunk.start), chunk.start // BLOCK, -(-chunk.end // BLOCK)
                table += chain(*own.entries[first:end])
                written = [*chain(*own.entries[begun:end])]
                if any(node.pool._references[block] > 1 or node.pool._digests[block] for block in written):
                    node.world.violate(f"{node.name} writes what others read: {chunk.sequence.request_id}")
                if group.grows and group.most:
                    node.world.faults["let a window go"] += not own.entries[0]
                    node.world.faults["found a window"] += chunk.start == chunk.sequence.num_cached > 0
                    node.world.faults["windows beside states"] += node.pool.fixed > 0
            if leased.intersection(table):
                node.world.violate(f"{node.name} attends to blocks under a lease: {chunk.sequence.request_id}")
            if any(node.pool._references[block] < 1 for block in table):
                node.world.violate(f"{node.name} computes in blocks that were given back: {chunk.sequence.request_id}")
        if weather.happens(weather.failed_pass):
            raise FailedPassError("the device failed")
        done = super().launch(chunks)
        if weather.happens(weather.no_logits):
            node.world.faults["no logits"] += 1
            done = Finished([None for _ in chunks])
        takes_s = node.world.form.token_s * sum(chunk.num_tokens for chunk in chunks if not _decodes(chunk))
        return Waited(done, takes_s) if self.as_on_gpus else done


class Waited:
    """A pass that is over when somebody has waited for it."""

    def __init__(self, done: Pass, takes_s: float) -> None:
        self.wait = done.wait
        self.takes_s = takes_s


def _decodes(chunk: Chunk) -> bool:
    return chunk.num_tokens == 1 and chunk.sample


_WORKER_TASKS = Counter({"every": 5, "Pipeline.run": 1, "FrameOutbox.run": 1, "JobIntake.keep_alive": 1})
_WORKER_TASKS |= {"DecodeRole._keep_house": 1, "Parking.run": 1}
_GATEWAY_TASKS = Counter({"Heartbeat.run": 1, "Watchdog.run": 1, "Requests._tell_differences": 1})


def _unusual(tasks: Iterable[asyncio.Task[Any]], usual: Counter[str]) -> str:
    """Names of running tasks beyond the usual ones; a heartbeat out of turn is nobody's request."""
    found = Counter(task.get_coro().__qualname__ for task in tasks if not task.done())  # type: ignore[union-attr]
    found.subtract(usual)
    return ", ".join(name for name, number in found.items() if number > 0 and name != "Heartbeat.beat_if_possible")
