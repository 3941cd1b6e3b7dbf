"""Both roles over one pool while passes overlap: every order of arrivals, cancels, failures and completions that chance finds.

The device loop, the roles, the schedulers and the pool are the real ones. The engine computes with the bytes in the pool,
either when a pass is launched or only when it is waited for, so a block that went back too early, a chunk planned from a
wrong position or a token delivered to the wrong request gives another answer than the oracle.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from common.messages import Cancel, HostTierTotals, PagePart, SamplingParams
from decode.drafts.speculation import NO_SPECULATION, NoSpeculation
from decode.request import DecodeRequest
from decode.role import DecodeRole
from engine.cache.block_pool import OutOfBlocksError
from engine.engine import Chunk, Pass, Sampled
from engine.fake.engine import FakeEngine
from engine.groups import Entry, Table, entries_of, extend
from engine.passes import Finished
from engine.sequence import Sequence
from prefill.role import PrefillRole
from prefill.stop import Stop
from tests.fakes.worker import BLOCK, Bench, claim, new_fake_engine, new_job
from worker.device.pipeline import MAX_IN_FLIGHT
from worker.serving.allocation import blocks_for, blocks_of, publish_computed

STEPS = 600
STATES = [
    PagePart(layers=2, planes=2, heads=1, dim=8, dtype="float32"),
    PagePart(layers=2, planes=1, heads=1, dim=100, dtype="float32", per_token=False),  # a block for each layer
]
WINDOWS = [STATES[0], PagePart(layers=3, planes=2, heads=1, dim=8, dtype="float32", window=10)]  # two blocks
BOTH = [*WINDOWS, STATES[1]]


class UnsteadyEngine:
    """Computes at once or late, and now and then raises: at the launch, or when it is waited for."""

    def __init__(self, engine: FakeEngine, rng: random.Random, *, is_late: bool, failure_rate: float) -> None:
        self.is_late = is_late
        self.failure_rate = failure_rate
        self.failures = 0
        self._engine = engine
        self._rng = rng

    def launch(self, chunks: list[Chunk]) -> Pass:
        self._fail_at_times()
        if self.is_late:
            return _Late(self, chunks)
        return Finished(self.compute(chunks))

    def compute(self, chunks: list[Chunk]) -> list[Sampled | None]:
        results = self._engine.launch(chunks).wait()
        if self.is_late:
            self._fail_at_times()
        return results

    def _fail_at_times(self) -> None:
        if self._rng.random() < self.failure_rate:
            self.failures += 1
            raise RuntimeError("the device lost a pass")


class _Late:
    def __init__(self, engine: UnsteadyEngine, chunks: list[Chunk]) -> None:
        self._engine, self._chunks = engine, chunks

    def wait(self) -> list[Sampled | None]:
        return self._engine.compute(self._chunks)


class Guesses(NoSpeculation):
    """Drafts that know the answers and spoil some: any number of them is accepted."""

    def __init__(self, rng: random.Random, answers: Mapping[str, list[int]]) -> None:
        self.accepted = self.refused = 0
        self._rng, self._answers = rng, answers

    def awaits(self, sequence: Sequence, *, rows: int) -> bool:
        return self._rng.random() < 0.5

    def stops_the_others(self, num_drafting: int, num_running: int) -> bool:
        return num_drafting > 0 and self._rng.random() < 0.5

    def drafts(
        self, wanted: Mapping[Sequence, int], *, rows: int, most_rows: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        found, room = dict[Sequence, tuple[int, ...]](), most_rows - rows
        for sequence, most in wanted.items():
            answer = self._answers[sequence.request_id][sequence.num_generated :]
            right = answer[: self._rng.randint(0, min(most, room, 4))]
            if right and self._rng.random() < 0.4:
                right[self._rng.randrange(len(right))] = self._rng.randrange(512)
            if right:
                found[sequence] = tuple(right)
                room -= len(right)
        return found

    def verified(self, sequence: Sequence, *, drafted: int, accepted: int) -> None:
        self.accepted += accepted
        self.refused += drafted - accepted


class Worker:
    """Two roles, the requests they were given, and what must hold after every step."""

    def __init__(self, seed: int, *, has_tier: bool) -> None:
        self.rng = rng = random.Random(seed)
        num_blocks, parts = rng.randint(10, 40), (STATES[:1], WINDOWS, STATES, BOTH)[seed % 4]
        self.engine = new_fake_engine(num_blocks, parts=parts)
        # It writes what is handed over.
        self._remote = new_fake_engine(num_blocks, parts=parts, allocate=lambda *_: self.engine.kv)
        self.unsteady = UnsteadyEngine(
            self.engine, rng, is_late=bool(seed % 2), failure_rate=rng.choice([0.0, 0.0, 0.02])
        )
        self.bench = Bench(
            self.engine,
            launcher=self.unsteady,
            token_budget=rng.randint(6, 30),
            max_sequences=rng.randint(1, 8),
            host_slots=rng.choice([20, 60, 300]) if has_tier else 0,
        )
        self.tier, self.copier = self.bench.tier, self.bench.copier
        self.gateway, self.pipeline = self.bench.gateway, self.bench.pipeline
        self.expected: dict[str, list[int]] = {}
        self.guesses = Guesses(rng, self.expected)
        self.decode = DecodeRole(self.bench.context, speculation=NO_SPECULATION if seed % 8 < 4 else self.guesses)
        self.prefill = PrefillRole(self.bench.context, max_requests=100)
        for role in (self.decode, self.prefill):
            self.pipeline.attach(role)
        self.cancelled: set[str] = set()
        self.sequences: list[Sequence] = []
        self.seen: Counter[str] = Counter()
        self._tables: dict[Chunk, list[list[Entry]]] = {}  # of chunks in flight, when first seen
        self._prompts = [[rng.randrange(512) for _ in range(50)] for _ in range(3)]  # shared prefixes

    async def act(self) -> None:
        """Do one thing that may happen to a worker at this moment."""
        actions = ["arrive", "hand over", "cancel", "launch", "launch", "launch", "wait", "wait", "wait"]
        actions += ["copy"] if self.tier is not None else []
        match self.rng.choice(actions):
            case "arrive" if len(self.expected) - len(self.gateway.ended) < 10:
                await self._arrive()
            case "hand over":
                self._hand_over()
            case "cancel" if self.expected and self.rng.random() < 0.3:
                await self._cancel(self.rng.choice(list(self.expected)))
            case "copy":
                self.copier.land_one()
            case "launch" if self.bench.launching:
                self.bench.launching.run_next()
            case "wait" if self.bench.waiting:
                self.bench.waiting.run_next()
        await self.settle()
        self.check()

    async def settle(self) -> None:
        for _ in range(self.rng.choice([0, 1, 12])):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Run the device until nothing is left to do."""
        for _ in range(20_000):
            if self.decode.idle() and self.prefill.idle() and not self.pipeline.busy:
                await self.bench.context.outbox.flush()
                self.copier.land()
                return
            self.copier.land_one()
            for thread in (self.bench.launching, self.bench.waiting):
                if thread:
                    thread.run_next()
            for _ in range(12):
                await asyncio.sleep(0)
            self.check()
        raise AssertionError(f"stuck: {self.decode.load()} {self.prefill.load()}")

    async def abandon(self) -> None:
        """Leave nothing behind, also when a check failed in the middle."""
        self.bench.launching.shutdown(wait=True)
        self.bench.waiting.shutdown(wait=True)
        await self.decode.close()
        serving = self.prefill.serving
        for request in serving:
            while self.prefill.blocks.in_use(request.sequence):
                self.prefill.blocks.landed(request.sequence)
            request.stop(Stop.WORKER_STOPPED)
        await asyncio.gather(*serving.values(), return_exceptions=True)
        await self.bench.stop()

    def check(self) -> None:
        passes = self.pipeline.in_flight
        assert len(passes) <= MAX_IN_FLIGHT
        in_flight = [chunk for chunks in passes for chunk in chunks]
        self._tables = {chunk: self._tables.get(chunk) or self._table_of(chunk) for chunk in in_flight}
        for chunk, entries in self._tables.items():
            assert self._table_of(chunk) == entries, "a pass in flight lost its blocks"
            assert all(all(each) for each in entries)
            for group, table in zip(self.bench.pool.groups, chunk.sequence.tables, strict=True):
                assert len(table.entries) * BLOCK >= chunk.end
                is_window = group.grows and group.most > 0
                self.seen["let windows go"] += is_window and not table.entries[0]
                self.seen["found windows"] += is_window and chunk.start == chunk.sequence.num_cached > 0
        self.seen["two passes in flight"] += len(passes) == MAX_IN_FLIGHT
        self.seen["left while in flight"] += self.decode.scheduler.blocks.awaited
        self.seen["a pending token was scheduled"] += any(
            chunk.num_tokens == 1 and chunk.end > len(chunk.sequence.token_ids) for chunk in in_flight
        )
        self._note_sequences()
        held = Counter(block for sequence in self.sequences for block in blocks_of(sequence))
        held += Counter(self.decode.scheduler.resume_point.blocks)
        held += Counter(self.tier.held if self.tier is not None else ())
        self.seen["held a resume point"] += bool(self.decode.scheduler.resume_point.blocks)
        references = self.bench.pool._references
        assert [held[block] for block in range(len(references))] == references
        for name, stream in self.gateway.streams.items():
            assert stream == self.expected[name][: len(stream)]

    def _table_of(self, chunk: Chunk) -> list[list[Entry]]:
        """The entries that a pass reads and writes, by group."""
        held = zip(self.bench.pool.groups, chunk.sequence.tables, strict=True)
        return [table.entries[group.first_seen(chunk.start) : -(-chunk.end // BLOCK)] for group, table in held]

    def _note_sequences(self) -> None:
        decoding = [request.sequence for request in self.decode.scheduler] + self.decode.scheduler.blocks.leaving
        present = decoding + [request.sequence for request in self.prefill.serving]
        known = set(self.sequences)
        self.sequences += [sequence for sequence in present if sequence not in known]
        self.sequences = [sequence for sequence in self.sequences if sequence.tables or sequence not in known]

    async def _arrive(self) -> None:
        is_prefill = self.rng.random() < 0.3
        prompt, sampling = self._new_request(max_tokens=1 if is_prefill else None)
        name, priority = self._expect(prompt, sampling), self.rng.randint(0, 2)
        job = new_job(name, prompt, sampling, prefill=is_prefill, priority=priority)
        await (self.prefill if is_prefill else self.decode).start(claim(job, self.gateway))

    def _hand_over(self) -> None:
        """What `decode.intake` does with a lease, in one go: blocks, foreign bytes, the sequence with its first token."""
        prompt, sampling = self._new_request(max_tokens=None)
        scheduler, pool = self.decode.scheduler, self.bench.pool
        num_blocks = blocks_for(len(prompt) + 1, BLOCK)
        needed = num_blocks * pool.growth + pool.fixed
        if sampling.max_tokens == 1 or len(scheduler) >= self.bench.context.model.max_sequences:
            return
        if pool.num_free < needed + len(scheduler) * pool.growth:
            return
        name = self._expect(prompt, sampling)
        job = new_job(name, prompt, sampling)
        sequence = Sequence(
            request_id=name,
            attempt=1,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            hash_root=job.hash_root,
        )
        counts = [num_blocks if group.grows else 1 for group in pool.groups]
        try:
            blocks = iter(pool.allocate(needed))
        except OutOfBlocksError:
            return
        for group, count in zip(pool.groups, counts, strict=True):
            table = Table(begin=len(prompt) - 1)
            fresh = entries_of([next(blocks) for _ in range(count * group.blocks)], group.blocks)
            extend(group, table, fresh, num_blocks)
            sequence.tables.append(table)
        (sampled,) = self._remote.launch([Chunk(sequence, 0, len(prompt), True)]).wait()
        assert sampled is not None
        sequence.restart(len(prompt))
        publish_computed(pool, sequence)
        sequence.append(sampled.token_id)
        self.gateway.streams[name] = [sampled.token_id]  # sent by the prefill worker
        if sequence.finish_reason():
            self.gateway.ended[name] = sequence.finish_reason()
            pool.release(blocks_of(sequence))
            return
        request = DecodeRequest(job=job, sequence=sequence, deadline_at=float("inf"), first_position=1)
        self.decode.activate(request)

    async def _cancel(self, name: str) -> None:
        if name not in self.gateway.ended or self.gateway.ended[name] == "settled":
            self.cancelled.add(name)
        for role in (self.decode, self.prefill):
            await role.handle(Cancel(request_id=name, attempt=1))

    def _new_request(self, *, max_tokens: int | None) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        prompt = self.rng.choice(self._prompts)[: rng.randint(1, min(30, self.bench.context.model.max_model_len - 2))]
        limit = rng.randint(1, 40)  # at times more than the worker's longest sequence
        sampling = SamplingParams(
            max_tokens=max_tokens or limit, temperature=rng.choice([0.0, 1.0]), seed=rng.getrandbits(64)
        )
        free = self.engine.expected(prompt, 8, sampling)
        stops = [rng.choice(free)] if rng.random() < 0.4 else []
        return prompt, SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_token_ids=stops,
            min_tokens=rng.choice([0, 0, 3]) if sampling.max_tokens > 3 else 0,
        )

    def _expect(self, prompt: list[int], sampling: SamplingParams) -> str:
        name = f"r{len(self.expected)}"
        self.expected[name] = self.engine.expected(
            prompt, self.bench.context.model.max_model_len - len(prompt), sampling
        )
        return name


async def run(seed: int, *, has_tier: bool = False) -> Worker:
    worker = Worker(seed, has_tier=has_tier)
    await worker.bench.start()
    loop = asyncio.create_task(worker.pipeline.run())
    try:
        for _ in range(STEPS):
            await worker.act()
            assert not loop.done(), loop.exception()
        await worker.finish()
    finally:
        loop.cancel()
        await worker.abandon()
        await asyncio.wait([loop])
    return worker


async def test_chance_finds_what_matters() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        worker = await run(seed)
        seen += worker.seen
        seen += {
            "preempted": worker.decode.scheduler.preemptions,
            "cancelled": len(worker.cancelled),
            "failed": worker.unsteady.failures,
            "accepted a draft": worker.guesses.accepted,
            "refused a draft": worker.guesses.refused,
            **Counter(worker.gateway.ended.values()),
        }
    wanted = ["two passes in flight", "left while in flight", "a pending token was scheduled"]
    wanted += [
        "let windows go",
        "found windows",
        "held a resume point",
        "preempted",
        "cancelled",
        "failed",
        "accepted a draft",
        "refused a draft",
        "stop",
        "length",
    ]
    assert [what for what in wanted if seen[what] < 5] == []


async def test_with_a_host_tier_chance_finds_loads_and_losses() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        totals = check_end(await run(seed, has_tier=True))
        seen += {name: getattr(totals, name) for name in HostTierTotals.__struct_fields__}
    assert seen["bad_digests"] == 0
    assert [
        name for name in ("stored_blocks", "loaded_blocks", "evicted_blocks", "lost_blocks") if not seen[name]
    ] == []


@pytest.mark.quick(first=4)
@pytest.mark.parametrize("has_tier", [False, True])
@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 20))])
async def test_every_answer_is_the_oracles_and_every_block_comes_back(seed: int, has_tier: bool) -> None:
    check_end(await run(seed, has_tier=has_tier))


def check_end(worker: Worker) -> HostTierTotals:
    """Return what became of the host tier, if there is one."""
    gateway = worker.gateway
    for name, expected in worker.expected.items():
        end = gateway.ended.get(name, "nothing")
        if name in worker.cancelled or "lost a pass" in end or end.startswith("step failed"):
            continue  # `check` has seen that what came before was right
        assert end in ("stop", "length"), (name, end)
        assert gateway.streams[name] == expected
    assert worker.bench.pool.num_used == 0
    if not worker.unsteady.failure_rate:
        assert not [end for end in gateway.ended.values() if end.startswith("step failed")]
    return HostTierTotals() if worker.tier is None else worker.tier.totals()
