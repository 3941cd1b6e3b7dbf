"""A gateway's owner of requests with its real parts, around a bus and a ledger in memory. Time is virtual: nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest

from common import subjects
from common.blocks import pack_tokens
from common.messages import (
    Ack,
    Claim,
    ClaimReply,
    Feature,
    Frame,
    Job,
    KVLayout,
    Region,
    Resend,
    SamplingParams,
    Tokens,
    ToWorker,
    WorkerState,
    to_worker_decoder,
)
from common.peers import Incarnation, Peers
from common.words import WorkerStatus
from gateway.admission.policy import RequestLimits
from gateway.answers.tokenizer import ChatTokenizer
from gateway.lifecycle.requests import OwnerSettings, OwnModels, Requests
from gateway.request.active import ActiveRequest
from gateway.request.spec import GenerationSpec, Origin
from tests.fakes.bus import MemoryBus
from tests.fakes.ledger import MemoryLedger
from tests.fakes.reading import events_of
from tests.simulation.clock import VirtualLoop, monotonic_is

LAYOUT = KVLayout(num_blocks=100, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
BEAT_S = 0.5


class _VirtualTime(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return _VirtualTime()


class FakeWorker:
    """Beats, listens under its name, and remembers what it was told."""

    def __init__(
        self, gateway: Gateway, name: str, roles: tuple[str, ...], incarnation: int, facts: dict[str, Any]
    ) -> None:
        self.itself = Incarnation(name, incarnation)
        self.heard: list[ToWorker] = []
        self.knows: set[str] = set()  # requests that it says it has
        self.is_out_of_room = False  # it says that they wait for a decode worker
        self.state = WorkerState(
            worker=name, incarnation=incarnation, roles=list(roles), status=WorkerStatus.READY, model="m", model_fingerprint="m",
            tokenizer_fingerprint="", vocab_size=100, max_model_len=1000, max_sequences=8, free_blocks=100,
            region=Region(transport="shm", incarnation=incarnation, layout=LAYOUT, address={}),
            prefill_tokens_per_s=1000.0, local_tokens_per_s=100.0, features=frozenset({Feature.NAMED}),
        )  # fmt: skip
        self.state = msgspec.structs.replace(self.state, **facts)
        self._gateway = gateway
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._subscription = await self._gateway.bus.serve(self.subject, to_worker_decoder, self._answer)
        self._life = asyncio.create_task(self._beat_often())
        await self.beat()

    async def beat(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        await self._gateway.bus.publish(subjects.heartbeat(self.itself.worker), self.state)

    async def die(self) -> None:
        """SIGKILL: no last words, and nobody listens under the name."""
        self.mute()
        await self._subscription.close()

    def mute(self) -> None:
        """Its heartbeats don't arrive any more; it still answers."""
        if self._life is not None:
            self._life.cancel()

    async def stop(self) -> None:
        """It was told to stop, and says so."""
        await self.die()
        await self.beat(status=WorkerStatus.STOPPED)

    @property
    def subject(self) -> str:
        return subjects.order(self.itself.worker, "here")

    def told(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if type(message) is kind]

    async def claim(self, request: ActiveRequest, **changes: Any) -> ClaimReply:
        """Ask whether it may start the current attempt, or the one in `changes`."""
        return await self.say(Claim, request, **changes)  # type: ignore[no-any-return]

    async def say(self, kind: type[Any], request: ActiveRequest, **changes: Any) -> Any:
        state, (worker, number) = request.state, self.itself
        about = {"request_id": state.spec.request_id, "attempt": state.attempt, "worker": worker, "incarnation": number}
        return await self._gateway.requests.inbox.answer(kind(**(about | changes)))

    def send(self, request: ActiveRequest, position: int, *ids: int, finish: str = "", **changes: Any) -> None:
        """A frame with tokens of the current attempt, or the one in `changes`."""
        about = {"request_id": request.state.spec.request_id, "attempt": request.state.attempt}
        tokens = Tokens(**(about | changes), position=position, token_ids=pack_tokens(list(ids)), finish=finish)
        frame = Frame(worker=self.itself.worker, incarnation=self.itself.number, tokens=[tokens])
        self._gateway.requests.inbox.take_frame(frame)

    async def _beat_often(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self.beat()

    async def _answer(self, message: ToWorker) -> Ack:
        self.heard.append(message)
        known = isinstance(message, Resend) and message.request_id in self.knows
        return Ack(known=known, waits=known and self.is_out_of_room)


class Gateway:
    """The owner, and the world around it."""

    def __init__(self, loop: VirtualLoop, tokenizers: Mapping[str, ChatTokenizer] | None = None) -> None:
        """`tokenizers`: of the models that it serves by name; without any it takes requests that name none."""
        self.loop = loop
        self.bus = MemoryBus()
        self.ledger = MemoryLedger()
        self.peers = Peers(clock=loop.time)
        limits = RequestLimits(cut_over_tokens=0)  # decode workers compute no prompts
        self.requests = Requests(
            self.bus,
            self.ledger,
            self.peers,
            OwnerSettings(gateway_id="here", incarnation=1, limits=limits),
            OwnModels(tokenizers=tokenizers or {}),
            clock=loop.time,
        )
        self.workers: dict[str, FakeWorker] = {}

    async def worker(self, name: str, *roles: str, incarnation: int = 1, **facts: Any) -> FakeWorker:
        """Another worker, ready. `facts` are of its state."""
        self.workers[name] = worker = FakeWorker(self, name, roles, incarnation, facts)
        await worker.start()
        return worker

    async def fleet(self) -> tuple[FakeWorker, FakeWorker, FakeWorker]:
        """Two prefill workers and one that decodes; the first requests go to p0."""
        p0 = await self.worker("p0", "prefill")
        return p0, await self.worker("p1", "prefill"), await self.worker("d0", "decode")

    async def submit(self, name: str = "r", **changes: Any) -> ActiveRequest:
        """A request that is queued."""
        [request] = await self.requests.submit([spec(name, **changes)])
        return request

    async def decoding(self, name: str = "r", **changes: Any) -> ActiveRequest:
        """A request with its first token, decoded by d0 since."""
        request = await self.submit(name, **changes)
        prefiller, decoder = self.workers[request.state.assigned], self.workers["d0"]
        await prefiller.claim(request)
        prefiller.send(request, 0, 100)
        decoder.send(request, 1, 101)
        for worker in (prefiller, decoder):
            worker.knows.add(name)
        return request

    def jobs(self, worker: str) -> list[Job]:
        """What waits in the worker's queue."""
        return [job for queue, job in self.bus.queued.values() if queue == worker]

    async def idle(self) -> None:
        """Return when what is to be done now is done."""
        await asyncio.sleep(0.01)


def spec(name: str = "r", **changes: Any) -> GenerationSpec:
    sampling = SamplingParams(max_tokens=changes.pop("max_tokens", 20))
    values: dict[str, Any] = {"request_id": name, "token_ids": [1] * 40, "sampling": sampling, "deadline_s": 60.0}
    origin = {"origin": Origin(changes.pop("tenant"))} if "tenant" in changes else {}
    return GenerationSpec(**(values | origin | changes))


async def answer_of(request: ActiveRequest) -> list[int]:
    """Everything that the client gets."""
    return [token async for event in events_of(request) for token in event.token_ids]


@contextlib.asynccontextmanager
async def open_gateway(tokenizers: Mapping[str, ChatTokenizer] | None = None) -> AsyncIterator[Gateway]:
    """Nothing runs by itself: no watchdog, no heartbeat. Workers are heard."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.callbacks = 0  # the loop is the module's, its bound a test's
    world = Gateway(loop, tokenizers)
    with monotonic_is(loop):
        world.requests.inbox.listen()
        await world.peers.start(world.bus)
        yield world
        await world.peers.close()
        for worker in world.workers.values():
            await worker.die()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A gateway that serves whatever model its workers have."""
    async with open_gateway() as world:
        yield world
