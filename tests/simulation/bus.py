"""The bus in memory: `common.bus.Bus` for every process, over one network that loses, repeats, delays and reorders.

Messages are encoded and decoded as on the wire. The work queue redelivers after an ack-wait, accepts stale acks, gives up
after `max_deliver`, and swallows a job into the pull of a worker that died, as JetStream does.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from common.errors import NobodyListensError, UnavailableError
from common.job_queue import QueueLimits
from common.messages import Job, decode, encode, job_decoder
from tests.simulation.clock import Process, VirtualLoop
from tests.simulation.honesty import believed, honest
from tests.simulation.weather import Weather

API_TIMEOUT_S = 0.5  # of the queue's own calls; the real one's is 2 s
LIMITS = QueueLimits(ack_wait_s=2.0)
Note = Callable[[Process, str, msgspec.Struct], None]
Decoder = msgspec.msgpack.Decoder[Any]

_nobody = Context()  # what is on its way belongs to no process, and outlives its sender


@dataclass(eq=False)
class Listener:
    """One subscription. `take(raw, reply)` is called in its process."""

    bus: SimBus
    take: Callable[[bytes, int], None]


class Network:
    """Between all processes. `on_way` counts the messages, besides heartbeats, that are not there yet."""

    def __init__(self, loop: VirtualLoop, weather: Weather, faults: Any, note: Note) -> None:
        self.loop = loop
        self.weather = weather
        self.faults = faults
        self.note = note
        self.jobs = JobStream(self)
        self.on_way = 0
        self.listeners: dict[str, list[Listener]] = defaultdict(list)
        self.waiting: dict[int, tuple[SimBus, asyncio.Future[bytes]]] = {}  # for replies
        self._last_reply = 0

    def send(self, subject: str, raw: bytes, reply: int = 0) -> bool:
        """Put a message on its way; False when nobody listens."""
        beat = subject.rpartition(".")[0] + ".*"
        found = [each for each in self.listeners[subject] + self.listeners[beat] if each.bus.listens]
        for listener in found:
            if subject.startswith(("baton.heartbeat", "baton.gatebeat")):
                if not self.weather.happens(self.weather.loss):
                    self._travel(listener, raw, reply, is_beat=True)
            else:
                for _ in range(self.copies()):
                    self._travel(listener, raw, reply)
        return bool(found)

    def copies(self) -> int:
        """How often a message arrives."""
        weather = self.weather
        if self.loses():
            return 0
        if weather.happens(weather.repeats):
            self.faults["repeated"] += 1
            return 2
        return 1

    def loses(self) -> bool:
        """Whether a message is lost."""
        lost = self.weather.happens(self.weather.loss)
        self.faults["lost"] += lost
        return lost

    def ask(self, bus: SimBus) -> tuple[int, asyncio.Future[bytes]]:
        """A place for an answer."""
        self._last_reply += 1
        answer: asyncio.Future[bytes] = self.loop.create_future()
        self.waiting[self._last_reply] = (bus, answer)
        return self._last_reply, answer

    def answer(self, sender: SimBus, reply: int, raw: bytes) -> None:
        """An answer travels as any message does."""
        if sender.holds(self.answer, sender, reply, raw):
            return
        for _ in range(self.copies()):
            self.on_way += 1
            self.loop.call_later(self._way_s(), self._answered, reply, raw, context=_nobody)

    def _answered(self, reply: int, raw: bytes) -> None:
        bus, answer = self.waiting.get(reply, (None, None))
        if bus is not None and bus.holds(self._answered, reply, raw):
            return
        self.on_way -= 1
        if bus is not None and answer is not None and bus.connected and bus.process.alive and not answer.done():
            answer.set_result(raw)

    def _travel(self, listener: Listener, raw: bytes, reply: int, *, is_beat: bool = False) -> None:
        if is_beat:
            self.loop.call_later(self.weather.way_s(), self._arrive_beat, listener, raw, context=_nobody)
            return
        self.on_way += 1
        self.loop.call_later(self._way_s(), self._arrive, listener, raw, reply, context=_nobody)

    def _way_s(self) -> float:
        way_s = self.weather.way_s()
        self.faults["late"] += way_s > 0.01
        return way_s

    def _arrive_beat(self, listener: Listener, raw: bytes) -> None:
        if listener.bus.holds(self._arrive_beat, listener, raw):
            return
        if listener.bus.connected and listener.bus.process.alive:
            listener.bus.process.context.copy().run(listener.take, raw, 0)

    def _arrive(self, listener: Listener, raw: bytes, reply: int) -> None:
        if listener.bus.holds(self._arrive, listener, raw, reply):
            return
        self.on_way -= 1
        if listener.bus.connected and listener.bus.process.alive:
            listener.bus.process.context.copy().run(listener.take, raw, reply)
        elif listener.bus.process.alive:
            self.faults["dropped while cut off"] += 1


class SimBus:
    """`Bus` of one process."""

    malformed = dead_letters = reconnects = forged = 0
    refuse = believed

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self.connected = True
        self.is_missed = False  # cut off, and the server knows it: nobody listens
        self._network = network
        self._stored: list[tuple[str, bytes]] = []  # published while cut off
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None  # what waits in the link

    @property
    def is_held(self) -> bool:
        """Whether everything waits in the link."""
        return self._held is not None

    @property
    def listens(self) -> bool:
        """As far as the server knows."""
        return self.process.alive and not self.is_missed

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        self._network.note(self.process, "send", message)
        await self._alive()
        self.publish_raw(subject, honest(subject, message))

    async def flush(self, timeout_s: float) -> None:
        if not self.connected or self.is_held:
            raise UnavailableError("not connected")
        await asyncio.sleep(self._network.weather.way_s())

    def publish_raw(self, subject: str, raw: bytes) -> None:
        if self.holds(self._network.send, subject, raw):
            return
        if self.connected:
            self._network.send(subject, raw)
        else:
            self._stored.append((subject, raw))

    async def request(self, subject: str, message: msgspec.Struct, decoder: Decoder, *, timeout_s: float) -> Any:
        if not self.connected:
            raise UnavailableError("not connected")
        self._network.note(self.process, "ask", message)
        await self._alive()
        reply, answer = self._network.ask(self)
        raw = honest(subject, message)
        if not self.holds(self._network.send, subject, raw, reply) and not self._network.send(subject, raw, reply):
            await asyncio.sleep(0.001)
            raise NobodyListensError(f"nobody listens on {subject}")
        try:
            async with asyncio.timeout(max(timeout_s, 0.001)):
                raw = await answer
        except TimeoutError as error:
            raise UnavailableError(f"no answer on {subject}") from error
        finally:
            self._network.waiting.pop(reply, None)
        return decode(decoder, raw)

    async def serve(
        self, subject: str, decoder: Decoder, handler: Callable[[Any], Awaitable[msgspec.Struct | None]]
    ) -> Any:
        async def work(message: msgspec.Struct, reply: int) -> None:
            self._network.note(self.process, "take", message)
            await self._alive()
            result = await handler(message)
            if reply and result is not None:
                self._network.note(self.process, "answer", result)
                await self._alive()
                self._network.answer(self, reply, encode(result))

        def take(raw: bytes, reply: int) -> None:
            self._network.loop.create_task(work(decode(decoder, raw), reply))

        self._network.listeners[subject].append(Listener(self, take))

    async def subscribe(self, subject: str, decoder: Decoder, handler: Callable[[Any], None]) -> Any:
        self._network.listeners[subject].append(Listener(self, lambda raw, _: handler(decode(decoder, raw))))

    async def publish_job(self, worker: str, job: Job) -> int:
        network = self._network
        if not self.connected:
            raise UnavailableError("not connected")
        network.note(self.process, "queue", job)
        await self._alive()
        if self.holds(network.jobs.store, worker, job):
            await asyncio.sleep(API_TIMEOUT_S)
            raise UnavailableError("could not queue the job")
        number, lost, lost_answer = 0, network.loses(), network.loses()
        await asyncio.sleep(network.weather.way_s())
        if not lost:
            number = network.jobs.store(worker, job)
        if lost or lost_answer:
            await asyncio.sleep(API_TIMEOUT_S)
            raise UnavailableError("could not queue the job")
        await asyncio.sleep(network.weather.way_s())
        return number

    async def delete_job(self, stream_seq: int, job: Job) -> None:
        if self.holds(self._network.jobs.end, stream_seq):
            return
        if self.connected and not self._network.loses():
            await asyncio.sleep(self._network.weather.way_s())
            self._network.jobs.end(stream_seq)

    async def bury_job(self, worker: str, job: Job, *, reason: str) -> None:
        self._network.note(self.process, "bury", job)

    async def has_job(self, stream_seq: int) -> bool:
        await asyncio.sleep(self._network.weather.way_s())
        if not self.connected or self.is_held or self._network.loses():
            raise UnavailableError("no answer")
        return stream_seq in self._network.jobs.stored

    async def jobs(self, worker: str) -> SimJobQueue:
        return SimJobQueue(self, self._network, worker)

    def cut(self) -> None:
        """Lose the connection; the server sees that at once, or goes on sending."""
        self.connected, self.is_missed = False, self._network.weather.dice.random() < 0.5

    def mend(self) -> None:
        """Connect again; what was published meanwhile is sent now."""
        self.connected, self.is_missed = True, False
        stored, self._stored = self._stored, []
        for subject, raw in stored:
            self._network.send(subject, raw)

    def hold(self) -> None:
        """From now on everything waits in the link, both ways and in order; neither end notices."""
        self._held = []

    def let_go(self) -> None:
        """What waited goes on."""
        held, self._held = self._held or [], None
        for way, arguments in held:
            way(*arguments)

    def holds(self, way: Callable[..., Any], *arguments: Any) -> bool:
        """Whether the link is held: then `way(*arguments)` is called once it is not."""
        if self._held is None:
            return False
        self._held.append((way, arguments))
        return True

    async def _alive(self) -> None:
        """A note may have killed this process: then the code that called it never goes on."""
        if not self.process.alive:
            await self._network.loop.create_future()


@dataclass(eq=False)
class Stored:
    """A job in the stream."""

    number: int
    worker: str
    raw: bytes
    delivered: int = 0
    hidden_until: float = 0.0  # in flight, or put off

    def is_there(self, now: float) -> bool:
        """Whether it can be delivered."""
        return self.hidden_until <= now and self.delivered < LIMITS.max_deliver


@dataclass(eq=False)
class Pull:
    """A worker waits for a job."""

    bus: SimBus
    until: float
    arrived: asyncio.Future[None] = field(repr=False)


class JobStream:
    """The work queue of all workers."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.stored: OrderedDict[int, Stored] = OrderedDict()
        self.dead_letters = 0
        self._numbers = count(1)
        self._seen: dict[str, int] = {}  # message id -> number, also of jobs that are over
        self._pulls: dict[str, list[Pull]] = defaultdict(list)

    def store(self, worker: str, job: Job) -> int:
        """Queue a job; the same (request, attempt) again is stored once."""
        name = f"{job.request_id}:{job.attempt}"
        if name not in self._seen:
            self._seen[name] = next(self._numbers)
            self.stored[self._seen[name]] = Stored(self._seen[name], worker, encode(job))
            self.offer(worker)
        return self._seen[name]

    def end(self, number: int) -> None:
        self.stored.pop(number, None)

    def hide(self, number: int, seconds: float) -> None:
        """Deliver it again after so long, unless it is over then."""
        job = self.stored.get(number)
        if job is not None:
            job.hidden_until = self.network.loop.now + seconds
            self.network.loop.call_later(seconds, self._visible, job, context=_nobody)

    def _visible(self, job: Stored) -> None:
        if job.number not in self.stored or job.hidden_until > self.network.loop.now:
            return
        if job.delivered >= LIMITS.max_deliver:
            self.network.faults["job given up"] += 1
            self.dead_letters += 1
            self.end(job.number)
        else:
            self.offer(job.worker)

    def take(self, worker: str, most: int) -> list[Stored]:
        """Deliver what is there."""
        now = self.network.loop.now
        jobs = [job for job in self.stored.values() if job.worker == worker and job.is_there(now)][:most]
        for job in jobs:
            job.delivered += 1
            self.network.faults["job redelivered"] += job.delivered > 1
            self.hide(job.number, LIMITS.ack_wait_s)
        return jobs

    def pull(self, worker: str, pull: Pull) -> None:
        self._pulls[worker].append(pull)

    def offer(self, worker: str) -> None:
        """The first pull gets it, also one whose worker is dead: the server doesn't know yet."""
        pulls = self._pulls[worker]
        while pulls:
            pull = pulls.pop(0)
            if pull.until <= self.network.loop.now or (pull.bus.process.alive and pull.arrived.done()):
                continue
            if pull.bus.process.alive:
                pull.arrived.set_result(None)
                return
            if self.take(worker, 1):
                self.network.faults["job in a dead pull"] += 1
                return


class SimJobQueue:
    """`JobQueue` of one worker."""

    def __init__(self, bus: SimBus, network: Network, worker: str) -> None:
        self._bus = bus
        self._network = network
        self._worker = worker

    async def fetch(self, max_jobs: int, *, expires_s: float = 1.0) -> list[Any]:
        network, jobs = self._network, self._network.jobs
        if not self._bus.connected or self._bus.is_held:
            await asyncio.sleep(min(0.2, expires_s))
            return []
        await asyncio.sleep(network.weather.way_s())
        found = jobs.take(self._worker, max_jobs)
        if not found:
            pull = Pull(self._bus, network.loop.now + expires_s, network.loop.create_future())
            jobs.pull(self._worker, pull)
            try:
                async with asyncio.timeout(expires_s):
                    await pull.arrived
            except TimeoutError:
                pull.arrived.cancel()
                return []
            found = jobs.take(self._worker, 1)
        await asyncio.sleep(network.weather.way_s())
        if not self._bus.connected or self._bus.is_held or network.loses():
            return []  # it comes again after the ack-wait
        return [SimDelivery(self._bus, network, job) for job in found]


class SimDelivery:
    """`Delivery` of the queue. Every word is one message, which may be lost."""

    def __init__(self, bus: SimBus, network: Network, stored: Stored) -> None:
        self.job: Job = decode(job_decoder, stored.raw)
        self.num_delivered = stored.delivered
        self._number = stored.number
        self._bus = bus
        self._network = network
        self._is_over = False

    async def ack(self) -> None:
        await self._say("ack", self._network.jobs.end, self._number)

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._say("nak", self._network.jobs.hide, self._number, delay_s)

    async def term(self) -> None:
        await self._say("term", self._network.jobs.end, self._number)

    async def in_progress(self) -> None:
        if self._bus.holds(self._network.jobs.hide, self._number, LIMITS.ack_wait_s):
            return
        if self._bus.connected:  # draws nothing: the order of claimed jobs in a set is not the seed's
            self._network.jobs.hide(self._number, LIMITS.ack_wait_s)

    async def _say(self, word: str, action: Callable[..., None], *arguments: Any) -> None:
        self._network.note(self._bus.process, word, self.job)
        await self._bus._alive()
        if self._is_over:
            return
        self._is_over = True
        if self._bus.holds(action, *arguments):
            return
        if not self._bus.connected:
            raise UnavailableError("not connected")
        if not self._network.loses():
            self._network.loop.call_later(self._network.weather.way_s(), action, *arguments, context=_nobody)
