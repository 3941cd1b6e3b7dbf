"""The rows of the engine's table: what each one runs, and what it must be compared with."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from benchmarks.engine.floors import Ceilings, ModelCost, decode_step, offline, prefill
from benchmarks.engine.workload import Prompts, Workload, driven
from benchmarks.results_format import Result
from common.blocks import hash_blocks
from decode.micro_batches import parts_of
from decode.request import DecodeRequest
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.engine import Engine
from engine.groups import entries_of
from worker.device.prompt_budget import PromptBudget
from worker.serving.allocation import blocks_for, cargo_of, received

UNREACHED_TOKENS = 1 << 30  # max_tokens of a sequence that only the measurement ends
GREEDY: Mapping[str, float] = MappingProxyType({"temperature": 0.0})
NUCLEUS: Mapping[str, float] = MappingProxyType({"temperature": 0.8, "top_p": 0.95})


class DoesNotFitError(Exception):
    """The pool of this card holds fewer positions than a cell's sequences have."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The shared part of all cells: one engine, its ceilings, a source of prompts."""

    engine: Engine
    ceilings: Ceilings
    cost: ModelCost
    prompts: Prompts
    token_budget: int
    started: list[Workload] | None = None  # where to note the workloads, for a profile
    stages: int = 1  # of the engine's model

    def budget(self) -> PromptBudget:
        budget = PromptBudget(token_budget=self.token_budget, pass_ms=self.engine.pass_ms)
        budget.launch_s = self.engine.launch_ms / 1000
        return budget

    def workload(self) -> Workload:
        workload = Workload(self.engine, stages=self.stages)
        if self.started is not None:
            self.started.append(workload)
        return workload


@dataclass(frozen=True, slots=True)
class Decode:
    """Steps of a full batch around one context length, with two passes in flight.

    The KV is random, the block tables are real. In stages a step is a pass of each part of the batch.
    """

    batch: int
    context: int
    sampling: Mapping[str, float] = field(default_factory=lambda: GREEDY)
    steps: int = 200
    warm_up: int = 20

    @property
    def name(self) -> str:
        return f"decode_b{self.batch}_ctx{self.context}" + ("" if self.sampling is GREEDY else "_top_p")

    async def measure(self, bench: Bench) -> list[Result]:
        parts = parts_of(bench.stages, self.batch)
        ends = (await self.run(bench)).pass_ends[self.warm_up * parts - 1 :: parts]
        steps = [1e3 * (end - start) for start, end in itertools.pairwise(ends)]
        floor = 1e3 * decode_step(bench.cost, batch=self.batch, context=self.context).seconds(bench.ceilings)
        p99 = sorted(steps)[min(len(steps) - 1, len(steps) * 99 // 100)]
        return [
            Result(name=self.name, value=statistics.median(steps), unit="ms", better="lower", floor=floor),
            Result(name=f"{self.name}_p99", value=p99, unit="ms", better="lower", floor=floor),
            Result(name=f"{self.name}_mean", value=statistics.fmean(steps), unit="ms", better="lower", floor=floor),
        ]

    async def run(self, bench: Bench) -> Workload:
        """Return the workload after all passes, those of the warm-up included.

        Raises DoesNotFitError where sequences would give way to one another: such steps are no full batch's.
        """
        workload = bench.workload()
        computed = self.first_context()
        lengths = [computed + 1] * self.batch
        for request in bench.prompts.requests(lengths, max_tokens=UNREACHED_TOKENS, sampling=dict(self.sampling)):
            try:
                pretend_computed(workload.pool, request, computed)
            except OutOfBlocksError as error:
                raise self._too_large(workload.pool) from error
            workload.join(request)
        workload.passes_left = (self.warm_up + self.steps) * parts_of(bench.stages, self.batch)
        size, last = workload.pool.block_size, computed + 1 + self.warm_up + self.steps
        if self.batch * (blocks_for(last, size) - blocks_for(computed + 1, size)) > workload.pool.num_free:
            raise self._too_large(workload.pool)
        async with driven(bench.engine, workload, budget=bench.budget()):
            await workload.finished()
        return workload

    def _too_large(self, pool: BlockPool) -> DoesNotFitError:
        return DoesNotFitError(
            f"{pool.num_blocks} blocks of {pool.block_size} tokens hold fewer than {self.batch} such sequences"
        )

    def first_context(self) -> int:
        """Return the positions computed before the warm-up, such that the measured steps have `context` in their middle."""
        computed = self.context - self.warm_up - self.steps // 2
        if computed < 1:
            raise ValueError(f"{self.name}: {self.warm_up + self.steps} steps do not fit around context {self.context}")
        return computed


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt on an idle worker, from the scheduler until its first token is on the host."""

    prompt: int
    runs: int = 20
    warm_up: int = 3

    @property
    def name(self) -> str:
        return f"ttft_p{self.prompt}"

    async def measure(self, bench: Bench) -> list[Result]:
        times = await self.run(bench)
        floor = 1e3 * prefill(bench.cost, [self.prompt]).seconds(bench.ceilings)
        return [
            Result(name=self.name, value=statistics.median(times), unit="ms", better="lower", floor=floor),
            Result(name=f"{self.name}_worst", value=max(times), unit="ms", better="lower", floor=floor),
        ]

    async def run(self, bench: Bench) -> list[float]:
        """Return the milliseconds of each run after the warm-up."""
        workload, times = bench.workload(), []
        async with driven(bench.engine, workload, budget=bench.budget()) as loop:
            for request in bench.prompts.requests([self.prompt] * (self.warm_up + self.runs), max_tokens=1):
                started = time.perf_counter()
                workload.enqueue(request)
                loop.wake()
                await workload.finished()
                times.append(1e3 * (workload.first_token_at[request.id] - started))
        return times[self.warm_up :]


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Many prompts at once, one token sampled for each."""

    prompts: int
    length: int
    warm_up: int = 32

    @property
    def name(self) -> str:
        return f"prefill_{self.length}"

    async def measure(self, bench: Bench) -> list[Result]:
        seconds = await self.run(bench)
        floor = prefill(bench.cost, [self.length] * self.prompts).seconds(bench.ceilings)
        tokens = self.prompts * self.length
        rate = tokens / seconds
        return [Result(name=self.name, value=rate, unit="tok/s", better="higher", floor=tokens / floor)]

    async def run(self, bench: Bench) -> float:
        await _all_at_once(bench, bench.prompts.requests([self.length] * self.warm_up, max_tokens=1))
        return await _all_at_once(bench, bench.prompts.requests([self.length] * self.prompts, max_tokens=1))


@dataclass(frozen=True, slots=True)
class Offline:
    """All requests are there from the start. One worker prefills and decodes, both in the same passes."""

    requests: int
    prompt: int
    output: int
    warm_up: int = 24

    @property
    def name(self) -> str:
        return f"offline_{self.prompt}_{self.output}"

    async def measure(self, bench: Bench) -> list[Result]:
        seconds = await self.run(bench)
        work = offline(bench.cost, requests=self.requests, prompt=self.prompt, output=self.output)
        at_best = work.seconds(bench.ceilings)
        tokens = self.requests * (self.prompt + self.output)
        return [
            Result(
                name=self.name,
                value=self.requests / seconds,
                unit="req/s",
                better="higher",
                floor=self.requests / at_best,
            ),
            Result(
                name=f"{self.name}_tokens",
                value=tokens / seconds,
                unit="tok/s",
                better="higher",
                floor=tokens / at_best,
            ),
        ]

    async def run(self, bench: Bench) -> float:
        if self.warm_up:
            warm_up = bench.prompts.requests([self.prompt] * self.warm_up, max_tokens=min(8, self.output))
            await _all_at_once(bench, warm_up)
        return await _all_at_once(bench, bench.prompts.requests([self.prompt] * self.requests, max_tokens=self.output))


Cell = Decode | FirstToken | PrefillRate | Offline

FULL: tuple[Cell, ...] = (
    *(Decode(batch, 1088) for batch in (1, 8, 16, 32, 64, 128, 256)),
    Decode(32, 8256),
    Decode(64, 4160),
    Decode(64, 1088, NUCLEUS),
    *(FirstToken(prompt) for prompt in (512, 2048, 8192)),
    PrefillRate(256, 1024),
    Offline(1000, 1024, 128),
)
# The same code in a second or two, on a CPU and a tiny model.
QUICK: tuple[Cell, ...] = (
    Decode(1, 64, steps=6, warm_up=2),
    Decode(8, 64, steps=6, warm_up=2),
    Decode(8, 64, NUCLEUS, steps=6, warm_up=2),
    FirstToken(48, runs=2, warm_up=1),
    PrefillRate(6, 64, warm_up=1),
    Offline(6, 48, 8, warm_up=1),
)


async def _all_at_once(bench: Bench, requests: list[DecodeRequest]) -> float:
    """Return the seconds from the first request's arrival to the last one's end."""
    workload = bench.workload()
    async with driven(bench.engine, workload, budget=bench.budget()) as loop:
        started = time.perf_counter()
        for request in requests:
            workload.enqueue(request)
        loop.wake()
        await workload.finished()
        return workload.pass_ends[-1] - started


def pretend_computed(pool: BlockPool, request: DecodeRequest, num_tokens: int) -> None:
    """Give the request blocks as if its first `num_tokens` tokens were computed; their KV is whatever the blocks hold."""
    sequence = request.sequence
    cargo, num_entries = cargo_of(pool, num_tokens), blocks_for(num_tokens + 1, pool.block_size)
    entries = [
        entries_of(pool.allocate(group.blocks * (num_entries - part.first if group.grows else 1)), group.blocks)
        for group, part in zip(pool.groups, cargo.groups, strict=True)
    ]
    sequence.tables = received(pool, cargo, entries, [0] * len(entries))
    sequence.digests = hash_blocks(sequence.hash_root, sequence.token_ids[:num_tokens], pool.block_size)
    sequence.restart(num_tokens)
