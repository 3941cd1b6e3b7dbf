"""What a role needs of its worker, from real parts: an in-memory bus, a gateway that keeps what it hears, threads run by hand."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from common import subjects
from common.blocks import pack_tokens, unpack_tokens
from common.messages import (
    Ack,
    Claim,
    ClaimReply,
    Failed,
    Frame,
    Job,
    Region,
    SamplingParams,
    Settle,
    SettleReply,
    ToGateway,
    TokenLogprobs,
    Tokens,
    ToWorker,
    WorkerReply,
    WorkerState,
    frame_decoder,
    to_gateway_decoder,
    to_worker_decoder,
)
from common.peers import Peers
from common.tasks import cancel_all
from common.tracing import NoTracer
from common.words import WorkerStatus
from engine.cache.block_pool import BlockPool
from engine.config import CacheConfig, EngineConfig
from engine.fake.engine import FakeEngine
from kvtransfer.local import LocalTransport
from kvtransfer.transport import Transfers, Transport
from tests.fakes.bus import MemoryBus
from tests.fakes.copier import HandCopier
from tests.fakes.device import HandThread, settled
from worker.context import Background, KVCache, Passes, RoleContext, ServedModel, Totals
from worker.device.launcher import SteppingEngine, Threads
from worker.device.pipeline import Pipeline
from worker.device.prompt_budget import PromptBudget
from worker.device.trials import Trials
from worker.identity import Identity, Messenger
from worker.roles import Roles
from worker.serving.allocation import longest_sequence
from worker.serving.jobs import ClaimedJob, FrameOutbox, JobIntake
from worker.serving.turns import Turns
from worker.tier.host_memory import HostMemory
from worker.tier.host_store import PrivateStore
from worker.tier.host_tier import HostTier

BLOCK = 4
GATEWAY = "gw"


def new_fake_engine(num_blocks: int, **options: Any) -> FakeEngine:
    """A fake engine that takes no time. `options`: of `FakeEngine`, and `max_model_len`."""
    max_model_len = options.pop("max_model_len", 60)
    config = EngineConfig(
        model=Path("fake"), max_model_len=max_model_len, cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK)
    )
    return FakeEngine(config, sleep=None, **options)


def new_job(name: str, prompt: list[int], sampling: SamplingParams, *, prefill: bool = False, priority: int = 0) -> Job:
    """A job for the decode role, or with `prefill` for the prefill role."""
    return Job(
        request_id=name,
        attempt=1,
        gateway=GATEWAY,
        token_ids=pack_tokens(prompt),
        num_prompt_tokens=len(prompt),
        hash_root=bytes(16),
        sampling=sampling,
        decode_workers=["elsewhere"] if prefill else [],
        deadline_ms=60_000,
        priority=priority,
    )


def claim(job: Job, gateway: HearingGateway | None = None) -> ClaimedJob:
    """The job as claimed by a worker; `gateway` notes when its delivery ends."""
    return ClaimedJob(job=job, delivery=MemoryDelivery(job, gateway), claimed_at=0.0, deadline_at=1e12)


class MemoryDelivery:
    """A delivery of a job that its gateway knows the end of."""

    num_delivered = 1

    def __init__(self, job: Job, gateway: HearingGateway | None) -> None:
        self.job = job
        self._gateway = gateway

    async def ack(self) -> None:
        """The job was settled."""

    async def term(self) -> None:
        if self._gateway is not None:
            self._gateway.ended.setdefault(self.job.request_id, "dropped")

    async def nak(self, delay_s: float = 0.0) -> None: ...

    async def in_progress(self) -> None: ...


class HearingGateway:
    """Grants every claim, and keeps what it was told of each request.

    `ended` says how: "stop", "length", "settled", "dropped", or why it failed.
    """

    def __init__(self) -> None:
        self.streams: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.ended: dict[str, str] = {}
        self.failures: dict[str, Failed] = {}
        self.unwanted: set[str] = set()  # requests that nobody waits for any more
        self.claims: Counter[str] = Counter()
        self.on_frame: Callable[[], object] = lambda: None

    async def listen(self, bus: MemoryBus) -> None:
        await bus.serve(subjects.gateway(GATEWAY, subjects.ANY), to_gateway_decoder, self._handle)
        await bus.subscribe(subjects.frames(GATEWAY, subjects.ANY), frame_decoder, self._take)

    async def _handle(self, message: ToGateway) -> ClaimReply | SettleReply | Ack:
        match message:
            case Claim():
                self.claims[message.request_id] += 1
                return ClaimReply(granted=message.request_id not in self.unwanted, remaining_ms=60_000)
            case Settle():
                self.ended.setdefault(message.request_id, "settled")
                return SettleReply(ack=True)
            case Failed():
                self.ended[message.request_id] = message.message
                self.failures[message.request_id] = message
        return Ack(known=True)

    def _take(self, frame: Frame) -> None:
        for tokens in frame.tokens:
            self._take_tokens(tokens)
        self.on_frame()

    def _take_tokens(self, tokens: Tokens) -> None:
        stream = self.streams.setdefault(tokens.request_id, [])
        assert tokens.position == len(stream), "a token was lost or sent twice"
        assert self.ended.get(tokens.request_id, "settled") in ("settled", "dropped"), "tokens after the end"
        stream += unpack_tokens(tokens.token_ids)
        self.logprobs.setdefault(tokens.request_id, []).extend(tokens.logprobs)
        if tokens.finish:
            self.ended[tokens.request_id] = tokens.finish


class Bench:
    """The parts that a worker would give to its roles in `context`. `start` them, and `stop` them at the end of the test."""

    def __init__(
        self,
        engine: FakeEngine,
        *,
        token_budget: int = 8,
        max_sequences: int = 8,
        launcher: SteppingEngine | None = None,
        transport: Transport | None = None,
        name: str = "w",
        host_slots: int = 0,
    ) -> None:
        """`launcher` computes the passes in place of `engine`; the copies of a host tier are in `copier`."""
        self.engine = engine
        self.bus = MemoryBus()
        self.gateway = HearingGateway()
        self.launching, self.waiting = HandThread(), HandThread()
        layout = engine.layout
        self.pool = BlockPool.of(layout)
        self.peers = Peers()
        self.roles = Roles(hands_over=True)
        self.roles.status = WorkerStatus.READY
        identity, trials = Identity(name, 1), Trials()
        self.pipeline = Pipeline(
            engine=launcher or engine,
            budget=PromptBudget(token_budget=token_budget),
            trials=trials,
            threads=Threads(self.launching, self.waiting),
        )
        self.copier = HandCopier()
        self.tier = None
        if host_slots:
            memory = HostMemory(engine.kv, layout, PrivateStore(host_slots))
            self.tier = HostTier(self.pool, memory, copier=self.copier, wake=self.pipeline.wake)
        cache = KVCache(
            layout=layout, kv=engine.kv, pool=self.pool, turns=Turns(changed=self.pipeline.wake), tier=self.tier
        )
        self.context = RoleContext(
            identity=identity,
            model=ServedModel(
                vocab_size=engine.vocab_size,
                max_model_len=min(engine.max_model_len, longest_sequence(self.pool)),
                max_sequences=max_sequences,
                grammars=engine.grammars,
            ),
            cache=cache,
            passes=Passes(wake=self.pipeline.wake, budget=self.pipeline.budget, trials=trials),
            jobs=JobIntake(bus=self.bus, identity=identity),
            outbox=FrameOutbox(bus=self.bus, identity=identity),
            messenger=Messenger(identity=identity, bus=self.bus, peers=self.peers),
            transfers=Transfers(
                transport=transport or LocalTransport(),
                region=Region(transport="memory", incarnation=1, layout=layout, address={}),
            ),
            roles=self.roles,
            background=Background(),
            totals=Totals(),
            tracer=NoTracer(),
        )

    async def start(self) -> None:
        await self.gateway.listen(self.bus)
        self._sending = asyncio.create_task(self.context.outbox.run())

    async def serve(self, worker: str, handle: Callable[[Any], Awaitable[WorkerReply | None]]) -> None:
        """Be another worker on this bus."""
        await self.bus.serve(subjects.peer(worker, subjects.ANY), to_worker_decoder, handle)

    def said(self, *kinds: type[ToWorker]) -> list[msgspec.Struct]:
        """What was published to other workers."""
        return [message for _, message in self.bus.published if isinstance(message, kinds)]

    async def stop(self) -> None:
        """End what was begun beside the roles' own requests, whose end is the test's business."""
        await cancel_all([self._sending, *self.context.background.tasks])

    def state(self, worker: str, *, incarnation: int = 1, address: str = "") -> WorkerState:
        """A heartbeat of another worker with this one's model."""
        region = msgspec.structs.replace(
            self.context.transfers.region, incarnation=incarnation, address={"at": address or worker}
        )
        return WorkerState(
            worker=worker,
            incarnation=incarnation,
            roles=["prefill"],
            status=WorkerStatus.READY,
            model="m",
            model_fingerprint=self.engine.fingerprint,
            tokenizer_fingerprint="t",
            vocab_size=self.engine.vocab_size,
            max_model_len=self.context.model.max_model_len,
            region=region,
            parity_hash=b"",
        )


@contextlib.asynccontextmanager
async def running_bench(engine: FakeEngine, **options: Any) -> AsyncIterator[Bench]:
    """A `Bench` that is started and stopped."""
    bench = Bench(engine, **options)
    await bench.start()
    try:
        yield bench
    finally:
        await bench.stop()


@contextlib.contextmanager
def slow_grammars(bench: Bench) -> Iterator[threading.Event]:
    """Grammars that are built only once the event is set, as at the end."""
    grammars, may_end = bench.engine.grammars, threading.Event()
    build = grammars._build

    def build_late(*arguments: Any) -> Any:
        assert may_end.wait(60.0)
        return build(*arguments)

    grammars._build = build_late  # type: ignore[method-assign]
    try:
        yield may_end
    finally:
        may_end.set()


async def grammars_built(bench: Bench) -> None:
    """Return when all are, and the roles have heard it. No others can be built after that."""
    await settled()
    await asyncio.to_thread(bench.engine.grammars._threads.shutdown)  # a thread's last act is to tell who waits
    await settled()
