"""Workers under a virtual clock: each has a prompt queue, a decode batch and a prefix cache, with measured costs.

Time moves from event to event. Between two events all passes of a worker take the same time, and its batch and oldest prompt
advance by the passes that fit. The prefix cache is the real `BlockPool`.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from benchmarks.simulate.costs import LOCAL_SLOWDOWN, PREFILL_FIXED_MS, PREFILL_TOKEN_MS, Chunk, prefill_ms, step_ms
from benchmarks.simulate.trace import TRACE_BLOCK, TraceRequest
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.step.warm import TIMED_PROMPTS
from worker.device.costs import PromptCost, pairs_of
from worker.device.step_policy import MIN_SLOTS, StepPolicy
from worker.serving.turns import Turns

POOL_BLOCKS = 58_000 * 16 // TRACE_BLOCK
MAX_SEQUENCES = 256
STEP_TARGET_MS = 7.1  # 1.77 bare steps, see `worker.device.step_policy`
TOKEN_BUDGET = 8192
STEPS = StepPolicy()
RATE_MEMORY = 0.9
_EPSILON = 1e-6
Role = Literal["prefill", "decode"]


@dataclass(slots=True, eq=False)
class Run:
    """A request in the simulation."""

    id: str
    request: TraceRequest
    prefill: Worker | None = None
    decode: list[Worker] = field(default_factory=list)  # candidates; [] = where it is prefilled
    reason: str = ""
    predicted_ms: float = 0.0  # time to first token; 0: the policy predicts none
    placed_work: int = 0  # uncached prompt tokens, by placement's estimate
    cached_tokens: int = 0
    first_token_ms: float = 0.0
    end_ms: float = 0.0
    refused: bool = False
    held: dict[Worker, list[int]] = field(default_factory=dict)
    work_ms: float = 0.0  # what is left of the prompt

    @property
    def ttft_ms(self) -> float:
        return self.first_token_ms - self.request.arrival_ms

    @property
    def tpot_ms(self) -> float:
        tokens = self.request.answer_tokens
        return (self.end_ms - self.first_token_ms) / (tokens - 1) if tokens > 1 else 0.0

    @property
    def uncached(self) -> int:
        return self.request.prompt_tokens - self.cached_tokens


class Worker:
    """One GPU. It reports of itself what `WorkerState` has."""

    def __init__(self, name: str, *roles: Role) -> None:
        self.name, self.roles = name, list(roles)
        self.pool = BlockPool(num_blocks=POOL_BLOCKS, block_size=TRACE_BLOCK)
        self.turns = Turns()
        self.prompts: deque[Run] = deque()  # the first may be computing, see `_has_begun`
        self.waiting: deque[Run] = deque()  # handed over, but there is no room yet
        self.batch: list[tuple[float, int, Run]] = []  # a heap by the step with the last token
        self.max_sequences = MAX_SEQUENCES
        self.has_fixed_budget = False  # every pass takes as many prompt tokens as there are, as vLLM's do
        self.queued_tokens = 0
        self.busy_ms = 0.0
        self.prompt_cost = PromptCost({tokens: prefill_ms(0, tokens) / 1000 for tokens in TIMED_PROMPTS})
        self.prompt_tokens_per_ms = (
            self.prompt_cost.tokens_per_s / 1000
        )  # with attention, as far as prompts were computed
        self.version = 0
        self._order = count()
        self._steps = self._context = self._at_ms = 0.0
        self._has_begun = False
        self._step_rate = self._work_rate = 0.0

    # -- its state ----------------------------------------------------------------------------------------------------

    @property
    def fixed_ms(self) -> float:
        return self.prompt_cost.fixed_ms

    @property
    def step_ms(self) -> float:
        return step_ms(len(self.batch), self._context)

    @property
    def local_tokens_per_s(self) -> float:
        """Prompt tokens a second beside the batch, within the step target."""
        tokens = self.tokens_beside(0)
        return 1000 * tokens / (self.step_ms + tokens * PREFILL_TOKEN_MS * LOCAL_SLOWDOWN)

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that are not computed. Waiting prompts count whole: their cached part is not known yet."""
        if not self._has_begun:
            return self.queued_tokens
        run = self.prompts[0]
        left = run.work_ms / (PREFILL_FIXED_MS + Chunk(run.cached_tokens, run.uncached).work_ms)
        return self.queued_tokens - int((1 - left) * run.uncached)

    def left_ms(self, now_ms: float) -> float | None:
        """Time left for the prompt that is being computed, in a pass of its own; None when none is."""
        if not self._has_begun:
            return None
        return max(0.0, self.prompts[0].work_ms - (now_ms - self._at_ms) * self._work_rate)

    def tokens_beside(self, backlog: int) -> int:
        """Prompt tokens in a pass with the batch. Where even the fewest are too many: a mean over passes with none."""
        if self.has_fixed_budget:
            return max(STEPS.sizes.min_prompt_tokens, min(backlog, TOKEN_BUDGET - len(self.batch)))
        token_ms = PREFILL_TOKEN_MS * LOCAL_SLOWDOWN
        fitting = tokens = int(STEPS.sizes.rounding_ratio * (STEP_TARGET_MS - self.step_ms) / token_ms)
        slots = STEPS.sizes.slots(len(self.batch)) if self.batch else MIN_SLOTS
        tokens += slots - (tokens + slots) % STEPS.sizes.tile_tokens - slots
        pressing = (backlog - STEPS.backlog.max_waiting_tokens) // STEPS.backlog.passes
        fewest = max(
            int(STEPS.turns.min_share * STEPS.sizes.min_prompt_tokens), min(STEPS.sizes.min_prompt_tokens, fitting)
        )
        return min(TOKEN_BUDGET, max(fewest, tokens, pressing))

    def has_room(self, run: Run) -> bool:
        return len(self.batch) < MAX_SEQUENCES and self.pool.num_free >= _blocks(run) + self.turns.kept_from(run)

    def cached_blocks(self, run: Run) -> int:
        """Leading blocks in the cache. Asking does not keep them from being evicted."""
        return self.pool.count_prefix(run.request.blocks)

    # -- events -------------------------------------------------------------------------------------------------------

    def advance(self, now_ms: float) -> None:
        """Let time pass; nothing may end before `now_ms`."""
        passed, self._at_ms = now_ms - self._at_ms, now_ms
        if self._step_rate or self._work_rate:
            self.busy_ms += passed
        self._steps += passed * self._step_rate
        self._context += passed * self._step_rate * len(self.batch)
        if self._has_begun:
            self.prompts[0].work_ms -= passed * self._work_rate

    def enqueue(self, run: Run) -> None:
        """Queue a prompt to be computed here."""
        self.prompts.append(run)
        self.queued_tokens += run.request.prompt_tokens

    def join(self, run: Run) -> bool:
        """Take a computed prompt into the batch, or let it wait; False when there is no room yet."""
        if not self._hold(run):
            self.waiting.append(run)
            return False
        self._add(run)
        return True

    def step_over(self) -> tuple[Run | None, list[Run]]:
        """Return (the prompt that is computed now, the sequences that ended now). Call `settle` afterwards."""
        computed, ended = None, []
        if self._has_begun and self.prompts[0].work_ms <= _EPSILON:
            computed = self._computed()
        while self.batch and self.batch[0][0] <= self._steps + _EPSILON:
            run = heapq.heappop(self.batch)[2]
            self._context -= run.request.prompt_tokens + run.request.answer_tokens
            ended.append(run)
        return computed, ended

    def settle(self) -> tuple[float, list[Run]]:
        """Begin what can begin. Return (ms until the next event, sequences that found room)."""
        joined = []
        while self.waiting and self._hold(self.waiting[0]):
            joined.append(run := self.waiting.popleft())
            self._add(run)
        if self.prompts and not self._has_begun:
            self._begin(self.prompts[0])
        self._set_rates()
        self.version += 1
        ends = []
        if self._has_begun and self._work_rate:
            ends.append(self.prompts[0].work_ms / self._work_rate)
        if self.batch:
            ends.append((self.batch[0][0] - self._steps) / self._step_rate)
        return max(0.0, min(ends, default=float("inf"))), joined

    def free(self, run: Run) -> None:
        """Free the run's blocks; they stay cached."""
        self.pool.release(run.held.pop(self, []))

    # -- within --------------------------------------------------------------------------------------------------------

    def _hold(self, run: Run) -> bool:
        if self in run.held:
            return True
        if len(self.batch) >= MAX_SEQUENCES:
            return False
        if self._allocate(run, _blocks(run)) is None:
            return False
        self._publish(run)
        return True

    def _publish(self, run: Run) -> None:
        for block, digest in zip(run.held[self], run.request.blocks, strict=False):
            self.pool.publish(block, digest)

    def _add(self, run: Run) -> None:
        last = self._steps + run.request.answer_tokens - 1
        heapq.heappush(self.batch, (last, next(self._order), run))
        self._context += run.request.prompt_tokens + 1

    def _begin(self, run: Run) -> None:
        needed = _blocks(run) if not run.decode else -(-run.request.prompt_tokens // TRACE_BLOCK)
        matched = self._allocate(run, needed)
        if matched is None:
            return
        run.cached_tokens = min(matched * TRACE_BLOCK, run.request.prompt_tokens - 1)
        run.work_ms = PREFILL_FIXED_MS + Chunk(run.cached_tokens, run.uncached).work_ms
        self.queued_tokens -= run.cached_tokens
        self._has_begun = True

    def _allocate(self, run: Run, needed: int) -> int | None:
        """Give the run its blocks and return how many were cached; None if there is no room beside what is kept for others."""
        matched = self.pool.match_prefix(run.request.blocks)
        try:
            rest = self.pool.allocate(needed - len(matched), spare=self.turns.kept_from(run))
        except OutOfBlocksError:
            self.pool.release(matched)
            self.turns.waits(run, blocks=needed)
            return None
        self.turns.admitted(run)
        run.held[self] = matched + rest
        return len(matched)

    def _computed(self) -> Run:
        run = self.prompts.popleft()
        self._has_begun = False
        self.queued_tokens -= run.uncached
        work_ms = Chunk(run.cached_tokens, run.uncached).work_ms
        rate = run.uncached / work_ms
        if run.uncached >= STEPS.sizes.min_prompt_tokens:
            self.prompt_tokens_per_ms = RATE_MEMORY * self.prompt_tokens_per_ms + (1 - RATE_MEMORY) * rate
            pairs = pairs_of(run.cached_tokens, run.request.prompt_tokens)
            self.prompt_cost.add(run.uncached, pairs, (PREFILL_FIXED_MS + work_ms) / 1000)
        self._publish(run)
        return run

    def _set_rates(self) -> None:
        base = self.step_ms
        if not self._has_begun:
            self._step_rate, self._work_rate = (1 / base if base else 0.0), 0.0
        elif not base:
            self._step_rate, self._work_rate = 0.0, 1.0
        else:
            run = self.prompts[0]
            token_ms = Chunk(run.cached_tokens, run.uncached).work_ms / run.uncached
            work_ms = self.tokens_beside(self.backlog_tokens) * token_ms
            pass_ms = base + work_ms * LOCAL_SLOWDOWN
            self._step_rate, self._work_rate = 1 / pass_ms, work_ms / pass_ms


def _blocks(run: Run) -> int:
    return -(-(run.request.prompt_tokens + run.request.answer_tokens) // TRACE_BLOCK)
