"""Cells of speculation: what verifying drafted tokens costs, and what drafts of a known acceptance bring.

Random weights accept nothing. So the drafter knows the text that the measurement pretends was sampled, and corrupts it at random:
the passes, their rows and the waiting for results are real, the tokens are not.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.engine.cells import UNREACHED_TOKENS, Bench, DoesNotFitError, pretend_computed
from benchmarks.engine.floors import decode_step
from benchmarks.engine.workload import Workload, driven
from benchmarks.results_format import Result
from benchmarks.weights.heads import NUM_DRAFTS, draft_bytes
from decode.drafts.drafting import Drafting
from decode.drafts.head import LIKE_A_MATCH_OF
from decode.drafts.speculation import NO_SPECULATION, Speculation
from decode.request import DecodeRequest
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.engine import Chunk, Engine, Sampled
from engine.sequence import Sequence
from worker.device.prompt_budget import PromptBudget
from worker.serving.allocation import grow

DRAFTED = 3  # tokens of a draft that is verified whole
LONGEST = 7  # tokens of a draft of which `DraftLengths` chooses
LOOKUP = "lookup"  # drafts from outside of the engine
TOKEN = 7  # the text that is pretended
OTHER = 8


@dataclass(frozen=True, slots=True)
class Verify:
    """A step of `1 + DRAFTED` rows a sequence beside one of a row, in turn, each from its launch to its results."""

    drafter: ClassVar = LOOKUP
    batch: int
    most: float  # of the step without drafts
    context: int = 1088
    runs: int = 60
    warm_up: int = 5

    @property
    def name(self) -> str:
        return f"verify_b{self.batch}_k{DRAFTED}"

    async def measure(self, bench: Bench) -> list[Result]:
        pool = BlockPool.of(bench.engine.layout)
        sequences = [request.sequence for request in _laid_out(bench, pool, self.batch, self.context)]
        one, verified = list[float](), list[float]()
        for _ in range(self.warm_up + self.runs):
            for times, drafted in ((one, ()), (verified, (TOKEN,) * DRAFTED)):
                times.append(_step(bench, sequences, drafted, context=self.context)[0])
        without, with_drafts = (statistics.median(times[self.warm_up :]) for times in (one, verified))
        floor = 1e3 * decode_step(bench.cost, batch=self.batch, context=self.context).seconds(bench.ceilings)
        return [
            Result(name=f"{self.name}_without", value=without, unit="ms", better="lower", floor=floor),
            Result(name=self.name, value=with_drafts, unit="ms", better="lower", floor=floor),
            Result(
                name=f"{self.name}_of_one_row", value=with_drafts / without, unit="x", better="lower", target=self.most
            ),
        ]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens a second with drafts of which each token is right with a probability, over those of `Decode`'s steps."""

    drafter: ClassVar = LOOKUP
    batch: int
    least: float  # of the rate without drafts
    acceptance: float = 0.7
    context: int = 1024  # before the first step; drafts make it longer sooner
    steps: int = 120
    warm_up: int = 20

    @property
    def name(self) -> str:
        return f"drafted_b{self.batch}_a{round(100 * self.acceptance)}"

    async def measure(self, bench: Bench) -> list[Result]:
        budget = bench.budget()
        cost = budget.step_cost
        drafting = Drafting(Corrupted(self.acceptance), most=LONGEST, step_ms=cost.rows.ms, wait_ms=cost.waits.ms)
        without = await self._rate(bench, NO_SPECULATION, bench.budget())
        rate = await self._rate(bench, drafting, budget)
        return [
            Result(name=f"{self.name}_without", value=without, unit="tok/s", better="higher"),
            Result(name=self.name, value=rate, unit="tok/s", better="higher"),
            Result(name=f"{self.name}_over_none", value=rate / without, unit="x", better="higher", target=self.least),
        ]

    async def _rate(self, bench: Bench, speculation: Speculation, budget: PromptBudget) -> float:
        workload = PretendedText(bench.engine, speculation=speculation)
        for request in _laid_out(bench, workload.pool, self.batch, self.context):
            workload.join(request)
        workload.passes_left = self.warm_up + self.steps
        async with driven(bench.engine, workload, budget=budget):
            await workload.finished()
        first, last = workload.pass_ends[self.warm_up - 1], workload.pass_ends[-1]
        return sum(workload.tokens[self.warm_up :]) / (last - first)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The time by which a step is longer that drafts behind it, with a head of random weights."""

    drafter: str
    batch: int
    most: float  # ms
    context: int = 1088
    runs: int = 60
    warm_up: int = 5

    @property
    def name(self) -> str:
        return f"draft_{self.drafter}_b{self.batch}"

    async def measure(self, bench: Bench) -> list[Result]:
        draft = bench.engine.config.draft
        assert draft is not None
        assert draft.folder is not None
        pool = BlockPool.of(bench.engine.layout)
        sequences = [request.sequence for request in _laid_out(bench, pool, self.batch, self.context)]
        pairs = [
            [self._step_ms(bench, sequences, drafts=drafts) for drafts in (False, True)]
            for _ in range(self.warm_up + self.runs)
        ]
        without, drafting = (statistics.median(times) for times in zip(*pairs[self.warm_up :], strict=True))
        floor = 1e3 * draft_bytes(draft.folder, self.drafter) / bench.ceilings.read_bytes_per_s
        return [
            Result(name=self.name, value=drafting - without, unit="ms", better="lower", target=self.most, floor=floor)
        ]

    def _step_ms(self, bench: Bench, sequences: ListOf[Sequence], *, drafts: bool) -> float:
        for sequence in sequences:
            sequence.drafts_from = 0 if drafts else UNREACHED_TOKENS
        ms, results = _step(bench, sequences, (), context=self.context)
        assert all(result is not None and bool(result.drafts) == drafts for result in results)
        return ms


def _step(
    bench: Bench, sequences: ListOf[Sequence], drafted: tuple[int, ...], *, context: int
) -> tuple[float, list[Sampled | None]]:
    """Milliseconds of a step from its launch to its results, and these; the sequences are as before."""
    chunks = [sequence.schedule(1, drafted) for sequence in sequences]
    started = time.perf_counter()
    results = bench.engine.launch(chunks).wait()
    seconds = time.perf_counter() - started
    for sequence in sequences:
        sequence.restart(context)
    return 1e3 * seconds, results


class PretendedText(Workload):
    """A workload whose sampled tokens are all `TOKEN`, whatever the engine says."""

    def __init__(self, engine: Engine, *, speculation: Speculation) -> None:
        super().__init__(engine, speculation=speculation)
        self.tokens: list[int] = []  # of each pass
        self._speculation = speculation

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        self.tokens.append(0)
        super().apply(results)

    def tokens_of(self, chunk: Chunk, sampled: Sampled | None) -> list[int]:
        """`TOKEN`, once more for each right drafted token before the first wrong one."""
        right = next((at for at, token in enumerate(chunk.drafted) if token != TOKEN), len(chunk.drafted))
        if chunk.drafted:
            self._speculation.verified(chunk.sequence, drafted=len(chunk.drafted), accepted=right)
        self.tokens[-1] += 1 + right
        return [TOKEN] * (1 + right)


class Corrupted:
    """A drafter that knows the text, each token with a probability. Its drafts come with a pass's results, as a head's do."""

    follows_results = True

    def __init__(self, acceptance: float) -> None:
        self._acceptance = acceptance
        self._random = random.Random(0)

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        return [TOKEN if self._random.random() < self._acceptance else OTHER for _ in range(most)]

    def match_length(self, sequence: Sequence) -> int:
        return LIKE_A_MATCH_OF

    def ended(self, sequence: Sequence) -> None:
        """No-op: the text is known."""


Cell = Verify | Drafted | DraftCost

FULL: tuple[Cell, ...] = (
    *(Verify(batch, most) for batch, most in ((1, 1.03), (8, 1.05), (16, 1.08), (32, 1.2))),
    *(Drafted(batch, least) for batch, least in ((1, 2.3), (16, 1.9), (64, 1.3), (256, 1.0))),
    *(DraftCost("eagle3", batch, most) for batch, most in ((1, 0.5), (16, 0.5))),
    *(DraftCost("dflash", batch, most) for batch, most in ((1, 0.5), (16, 0.8))),
)
QUICK: tuple[Cell, ...] = (
    Verify(2, 4.0, context=64, runs=2, warm_up=1),
    Drafted(2, 0.1, context=64, steps=6, warm_up=2),
    *(DraftCost(drafter, 2, 50.0, context=64, runs=2, warm_up=1) for drafter in NUM_DRAFTS),
)


def _laid_out(bench: Bench, pool: BlockPool, batch: int, context: int) -> list[DecodeRequest]:
    """Requests with blocks for `context` positions, whose KV is random, and for a draft.

    Raises DoesNotFitError, also for a model with states, whose entries of a draft these cells do not lay out.
    """
    if not all(group.grows for group in pool.groups):
        raise DoesNotFitError("a draft's states need entries of their own")
    requests = bench.prompts.requests([context + 1] * batch, max_tokens=UNREACHED_TOKENS)
    try:
        for request in requests:
            pretend_computed(pool, request, context)
            grow(pool, request.sequence, num_tokens=context + 1 + LONGEST)
    except OutOfBlocksError as error:
        raise DoesNotFitError(f"{pool.num_blocks} blocks hold fewer than {batch} such sequences") from error
    return requests
