"""Real attention under a real scheduler in a pool that is too small: chunks, hits, evictions, preemption, two passes in flight.

A block that is handed out is full of NaN, so that nothing stale can look right.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Iterator

import pytest
import torch

from decode.scheduler import DecodeScheduler
from engine import groups
from engine.cache.block_pool import BlockPool
from engine.config import CacheConfig, EngineConfig
from engine.engine import Chunk, Engine, Sampled
from engine.sequence import Sequence
from tests.unit.decode.scheduling import make_request
from tests.unit.engine import hybrid_windows
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.poisoned_pool import PoisonedPool
from worker.serving.allocation import longest_sequence, publish_computed

BLOCK = 16
NUM_REQUESTS = 6
MAX_IDLE = 50  # turns without a pass
SEEDS = 13
SOME = {False: range(3), True: range(9, SEEDS)}  # by whether windows have blocks of their own; the others are `long`


class Served:
    """Some requests with few beginnings, planned by a decode worker's scheduler, in a pool of few blocks."""

    def __init__(self, ample: Engine, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        layout = ample.layout
        beside, checkpoints = layout.blocks_beside(ample.max_model_len), 2 * BlockPool.of(layout).fixed
        config = EngineConfig(
            model=ample.config.model,
            cache=CacheConfig(num_blocks=rng.choice([8, 10, 14]) + beside + rng.choice([0, 5]) + checkpoints),
        )
        self.engine = Engine(config, lender=ample)
        self.pool = PoisonedPool.of(self.engine.layout)
        assert isinstance(self.pool, PoisonedPool)
        self.pool.lanes = self.engine.kv.flatten(1).view(torch.uint8)
        self.longest = longest_sequence(self.pool)
        self.scheduler = DecodeScheduler(pool=self.pool, max_sequences=3, max_model_len=self.longest)
        self.budget, self.depth = rng.choice([16, 23, 100]), rng.choice([1, 2])
        self.stems = [prompt_of(rng.randint(20, self.longest - 30), seed=number) for number in range(2)]
        self.sequences: list[Sequence] = []
        self.in_flight = deque[tuple[list[Chunk], list[Sampled | None]]]()
        self.seen = Counter[str]()

    def run(self) -> None:
        idle = 0
        while len(self.sequences) < NUM_REQUESTS or len(self.scheduler) or self.in_flight:
            if len(self.sequences) < NUM_REQUESTS and self.rng.random() < 0.5:
                self._ask()
            if len(self.in_flight) < self.depth and (chunks := self.scheduler.plan(self.budget)):
                self.in_flight.append((chunks, self.engine.launch(chunks).wait()))
                idle = 0
            elif self.in_flight:
                self._land(*self.in_flight.popleft())
            else:
                idle += 1
                assert idle < MAX_IDLE, "nobody goes on"
        self.seen["preempted"] += self.scheduler.preemptions

    def _ask(self) -> None:
        stem = self.rng.choice(self.stems)
        own = prompt_of(self.rng.randint(1, 20), seed=self.rng.randrange(10**6))
        prompt = [*stem[: self.rng.randint(1, len(stem))], *own][: self.longest - 3]
        max_tokens = self.rng.randint(1, min(40, self.longest - len(prompt) - 1))
        request = make_request(f"r{len(self.sequences)}", prompt=len(prompt), max_tokens=max_tokens)
        request.sequence = new_sequence(request.id, prompt, max_tokens=max_tokens)
        self.sequences.append(request.sequence)
        self.scheduler.enqueue(request)

    def _land(self, chunks: list[Chunk], results: list[Sampled | None]) -> None:
        for chunk, sampled in zip(chunks, results, strict=True):
            request, sequence = self.scheduler.landed(chunk), chunk.sequence
            if request.is_over:
                continue
            self.seen["found"] += chunk.start == sequence.num_cached > 0
            sequence.finish(chunk)
            publish_computed(self.pool, sequence)
            self.seen["let go"] += not sequence.tables[1].entries[0]
            if chunk.sample:
                assert sampled is not None, "NaN among the logits"
                sequence.append(sampled.token_id)
                if sequence.finish_reason():
                    request.ended_at = 1.0
                    self.scheduler.remove(request)


@pytest.fixture(scope="module", params=["gemma3", "llama4-chunks", "windows and states"])
def ample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with room for everything."""
    case = next(case for case in (*CASES, hybrid_windows.CASE) if case.name == request.param)
    folder = case.build(tmp_path_factory.mktemp("served"))
    with hybrid_windows.windows() if case is hybrid_windows.CASE else contextlib.nullcontext():
        yield Engine(EngineConfig(model=folder, cache=CacheConfig(num_blocks=400)))


@pytest.mark.quick("windows and states-True")
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.long)])
def test_answers_are_those_of_an_ample_pool(ample: Engine, some: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LEAST_AHEAD", 32)  # prompts here are no longer than the real one
    monkeypatch.setattr(groups, "CHECKPOINT_EVERY", 0.5)
    assert ample.layout.groups[0].blocks_per_entry > 1
    seen, chosen = Counter[str](), SOME[len(ample.layout.groups) > 1]
    for seed in (seed for seed in range(SEEDS) if (seed in chosen) is some):
        served = Served(ample, seed)
        served.run()
        seen += served.seen
        assert served.pool.num_used == 0
        for sequence in served.sequences:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            alone = new_sequence("alone", prompt, max_tokens=sequence.sampling.max_tokens)
            assert Generator(ample).run([alone]) == [sequence.token_ids[sequence.num_prompt_tokens :]], seed
    assert [what for what in ("found", "let go", "preempted") if not seen[what]] == []
