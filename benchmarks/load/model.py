"""A worker of both roles in simulated time: the real scheduler, budget and block pool, and a device that only takes time.

As in the real pipeline one pass is planned while another is computed, and as in the real role no job is claimed while one
that was claimed waits for its place.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Protocol

from benchmarks.load.cells import Cell
from benchmarks.load.device import KV_BLOCK, KV_BLOCKS, MAX_BATCH_TOKENS, PassCosts
from benchmarks.simulate.run import percentile
from benchmarks.simulate.trace import TRACE_BLOCK, TraceRequest
from common.messages import Goal, Job, SamplingParams
from decode.request import DecodeRequest
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk
from engine.sequence import Sequence as Tokens
from worker.device.pipeline import IDLE_AFTER_S, MAX_IN_FLIGHT
from worker.device.prompt_budget import PassLoad, PromptBudget
from worker.serving.allocation import publish_computed

WAY_S = 0.006  # a request's way to the worker and its first token's way back
VOCABULARY = 128_000
MAX_MODEL_LEN = 40_000
PAUSE_MS = 1000.0
ANSWER_TOKEN = 7

Clock = Callable[[], float]


class Scheduler(Protocol):
    """The part of `DecodeScheduler` that a worker drives; a yardstick has its own."""

    preemptions: int

    def __iter__(self) -> Iterator[DecodeRequest]: ...
    def __len__(self) -> int: ...
    def enqueue(self, request: DecodeRequest) -> None: ...
    def remove(self, request: DecodeRequest) -> None: ...
    def landed(self, chunk: Chunk) -> DecodeRequest: ...
    def plan(self, token_budget: int) -> list[Chunk]: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to schedule: `build` makes a worker's scheduler, `room` tells the jobs that it would claim now."""

    name: str
    build: Callable[[BlockPool, PromptBudget, Clock], Scheduler]
    room: Callable[[Scheduler], int]
    budget: Callable[[PassCosts], PromptBudget]


@dataclass(slots=True)
class Run:
    """One request and its times in seconds."""

    request: TraceRequest
    goal: Goal
    first_at: float = 0.0
    end_at: float = 0.0
    refusal: str = ""  # the server's answer, if it was none with tokens

    way_s: float = 0.0  # to the worker and back, which a client's times have in them

    @property
    def ttft_s(self) -> float:
        return self.first_at + self.way_s - self.request.arrival_ms / 1000

    @property
    def tpot_s(self) -> float:
        return (self.end_at - self.first_at) / max(1, self.request.answer_tokens - 1)

    @property
    def is_good(self) -> bool:
        return (
            not self.refusal
            and self.ttft_s <= self.goal.ttft_s(self.request.prompt_tokens)
            and self.tpot_s <= self.goal.tpot_s
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The runs of a load under a policy."""

    runs: Sequence[Run]
    passes: int
    preemptions: int
    plan_ms: float  # of a decision, on average, measured here

    @property
    def served(self) -> list[Run]:
        return [run for run in self.runs if not run.refusal]

    def ttft_ms(self, quantile: float) -> float:
        return percentile([1000 * run.ttft_s for run in self.served], quantile)

    def tpot_ms(self, quantile: float) -> float:
        return percentile([1000 * run.tpot_s for run in self.served if run.request.answer_tokens > 1], quantile)

    @property
    def good(self) -> float:
        return sum(run.is_good for run in self.runs) / len(self.runs)

    @property
    def per_second(self) -> float:
        """Requests served, by the time from the first arrival to the last token."""
        last = max((run.end_at for run in self.served), default=math.inf)
        return len(self.served) / (last - self.runs[0].request.arrival_ms / 1000)


@dataclass(slots=True)
class _Pass:
    chunks: list[Chunk]
    began_at: float
    over_at: float


class Gate(Protocol):
    """A gateway's admission before a worker."""

    def offer(self, request: DecodeRequest, run: Run, worker: Worker) -> None:
        """Take a request, or refuse it."""
        ...

    def started(self, worker: Worker) -> list[tuple[DecodeRequest, Run]]:
        """Requests that are sent to the worker now."""
        ...

    def computed(self, request: DecodeRequest) -> None:
        """Record a first token."""
        ...

    def ended(self, request: DecodeRequest) -> None: ...


@dataclass(slots=True)
class Worker:
    """The worker, its queue of unclaimed jobs, and the clock of the simulation."""

    costs: PassCosts
    policy: Policy
    gate: Gate | None = None  # a gateway before it
    budget: PromptBudget = field(init=False)
    pool: BlockPool = field(init=False)
    scheduler: Scheduler = field(init=False)
    now: float = 0.0
    passes: int = 0
    plan_s: float = 0.0
    _queue: deque[tuple[DecodeRequest, Run]] = field(default_factory=deque)
    _runs: dict[DecodeRequest, Run] = field(default_factory=dict)
    _in_flight: deque[_Pass] = field(default_factory=deque)
    _over_at: float = 0.0

    def __post_init__(self) -> None:
        self.budget = self.policy.budget(self.costs)
        self.pool = BlockPool(num_blocks=KV_BLOCKS, block_size=KV_BLOCK)
        self.scheduler = self.policy.build(self.pool, self.budget, lambda: self.now)

    def serve(self, runs: Sequence[Run]) -> Outcome:
        """Serve all of them."""
        arrivals = [(run.request.arrival_ms / 1000, number) for number, run in enumerate(runs)]
        heapq.heapify(arrivals)
        while arrivals or self._queue or len(self.scheduler):
            due = [arrivals[0][0]] if arrivals else []
            due += [self._in_flight[0].over_at] if self._in_flight else []
            self.now = min(due)
            while arrivals and arrivals[0][0] <= self.now:
                _, number = heapq.heappop(arrivals)
                request = _request(number, runs[number], self.now)
                if self.gate is None:
                    self._queue.append((request, runs[number]))
                else:
                    self.gate.offer(request, runs[number], self)
            if self.gate is not None:
                self._queue += self.gate.started(self)
            while self._in_flight and self._in_flight[0].over_at <= self.now:
                self._deliver(self._in_flight.popleft())
            self._go_on()
        return Outcome(runs, self.passes, self.scheduler.preemptions, 1000 * self.plan_s / max(1, self.passes))

    def _go_on(self) -> None:
        """Claim jobs, and launch passes while there is room for them."""
        while True:
            for request, run in [
                self._queue.popleft() for _ in range(min(len(self._queue), self.policy.room(self.scheduler)))
            ]:
                self._runs[request] = run
                self.scheduler.enqueue(request)
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                return
            began = time.perf_counter()
            chunks = self.scheduler.plan(MAX_BATCH_TOKENS)
            self.plan_s += time.perf_counter() - began
            if not chunks:
                return
            load = PassLoad.of(chunks)
            if load.decoding:
                self.budget.planned(decoding=load.decoding, prompt_tokens=load.prompt_tokens)
            began_at = max(self.now, self._in_flight[-1].over_at if self._in_flight else 0.0)
            self._in_flight.append(_Pass(chunks, began_at, began_at + self.costs.of_chunks(chunks) / 1000))

    def _deliver(self, over: _Pass) -> None:
        self.passes += 1
        after_idling = over.began_at - self._over_at > IDLE_AFTER_S
        self._over_at = over.over_at
        self.budget.measured(PassLoad.of(over.chunks), over.over_at - over.began_at, after_idling=after_idling)
        for chunk in over.chunks:
            request = self.scheduler.landed(chunk)
            if request.is_over:
                continue
            chunk.sequence.finish(chunk)
            publish_computed(self.pool, chunk.sequence)
            if chunk.sample:
                self._sampled(request)

    def _sampled(self, request: DecodeRequest) -> None:
        run = self._runs[request]
        request.sequence.append(ANSWER_TOKEN)
        if not request.first_token_at:
            request.first_token_at = run.first_at = self.now
            if self.gate is not None:
                self.gate.computed(request)
        if request.sequence.finish_reason():
            request.ended_at = run.end_at = self.now
            self.scheduler.remove(request)
            del self._runs[request]
            if self.gate is not None:
                self.gate.ended(request)


def serve(
    cell: Cell, policy: Policy, *, seconds: float, traces: Path | None = None, gate: Gate | None = None
) -> Outcome:
    """The outcome of a cell's first seconds."""
    worker = Worker(PassCosts.of(cell.device), policy, gate)
    start_ms = 0.0
    if cell.before is not None:
        worker.serve([Run(request, cell.goal) for request in cell.before(seconds, traces)])
        start_ms = 1000 * worker.now + PAUSE_MS
    shifted = [replace(one, arrival_ms=one.arrival_ms + start_ms) for one in cell.requests(seconds, traces)]
    return worker.serve([Run(request, cell.goal, way_s=WAY_S) for request in shifted])


def _request(number: int, run: Run, now: float) -> DecodeRequest:
    job = Job(
        request_id=f"r{number}",
        attempt=1,
        gateway="gw",
        token_ids=b"",
        num_prompt_tokens=run.request.prompt_tokens,
        hash_root=bytes(16),
        sampling=SamplingParams(max_tokens=run.request.answer_tokens, temperature=0.0),
        decode_workers=[],
        deadline_ms=600_000,
        goal=run.goal,
    )
    sequence = Tokens(
        request_id=job.request_id,
        attempt=1,
        token_ids=tokens_of(run.request, number),
        num_prompt_tokens=job.num_prompt_tokens,
        sampling=job.sampling,
        hash_root=job.hash_root,
    )
    return DecodeRequest(job=job, sequence=sequence, deadline_at=float("inf"), first_position=0, began_at=now)


def tokens_of(request: TraceRequest, number: int) -> list[int]:
    """Equal tokens for equal blocks; the rest is the request's own."""
    shared = [token for block in request.blocks for token in islice(_drawn(block), TRACE_BLOCK)]
    own = islice(_drawn(b"own-%d-%f" % (number, request.arrival_ms)), request.prompt_tokens - len(shared))
    return [*shared, *own]


def _drawn(seed: bytes) -> Iterator[int]:
    start = int.from_bytes(blake2b(seed, digest_size=4).digest(), "little")
    return ((start + 7919 * at) % VOCABULARY for at in range(1_000_000))
