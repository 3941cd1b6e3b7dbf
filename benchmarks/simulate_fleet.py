"""Workers under a virtual clock: a prompt queue, a decode batch and a prefix cache each, with measured costs.

Time goes on from event to event. Between two events a worker's pass takes the same time; its batch and the oldest prompt
advance by as much as passes fit in. The prefix cache is the real `BlockPool`.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from benchmarks.simulate_costs import LOCAL_SLOWDOWN, PREFILL_FIXED_MS, PREFILL_TOKEN_MS, Chunk, prefill_ms, step_ms
from benchmarks.simulate_trace import TRACE_BLOCK, TraceRequest
from engine.block_pool import BlockPool, OutOfBlocksError
from engine.warm import TIMED_PROMPTS
from worker.prompt_cost import PromptCost, pairs_of

POOL_BLOCKS = 58_000 * 16 // TRACE_BLOCK
MAX_SEQUENCES = 256
STEP_TARGET_MS = 7.1  # a worker's own bounds: see `worker.device`
PATIENT_TOKENS, BACKLOG_STEPS, FEWEST_PROMPT_TOKENS, LEAST_TURNS, TOKEN_BUDGET = 8192, 4, 64, 0.5, 8192
PASS_STEP, NEARLY = 128, 1.15
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
    predicted_ms: float = 0.0  # time to first token, 0 = the policy doesn't say
    placed_work: int = 0  # prompt tokens that placement thought to be left
    cached_tokens: int = 0
    first_token_ms: float = 0.0
    end_ms: float = 0.0
    refused: bool = False
    held: dict[Worker, list[int]] = field(default_factory=dict)
    work_ms: float = 0.0  # of the prompt, left

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
    """One GPU. What it reports of itself is what `WorkerState` has."""

    def __init__(self, name: str, *roles: Role) -> None:
        self.name, self.roles = name, list(roles)
        self.pool = BlockPool(num_blocks=POOL_BLOCKS, block_size=TRACE_BLOCK)
        self.prompts: deque[Run] = deque()  # the first one is being computed, if it has begun
        self.waiting: deque[Run] = deque()  # handed over, without room
        self.batch: list[tuple[float, int, Run]] = []  # a heap by the step with the last token
        self.max_sequences = MAX_SEQUENCES
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

    # -- what is known of it -------------------------------------------------------------------------------------------

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
        """Prompt tokens here that are not computed; what of the waiting prompts is cached is not known yet."""
        if not self._has_begun:
            return self.queued_tokens
        run = self.prompts[0]
        left = run.work_ms / (PREFILL_FIXED_MS + Chunk(run.cached_tokens, run.uncached).work_ms)
        return self.queued_tokens - int((1 - left) * run.uncached)

    def left_ms(self, now_ms: float) -> float | None:
        """Of the prompt that is being computed, in a pass of its own; None when none is."""
        if not self._has_begun:
            return None
        return max(0.0, self.prompts[0].work_ms - (now_ms - self._at_ms) * self._work_rate)

    def tokens_beside(self, backlog: int) -> int:
        """Prompt tokens in a pass with the batch; the mean of passes with and without them where the fewest are too many."""
        fitting = tokens = int(NEARLY * (STEP_TARGET_MS - self.step_ms) / (PREFILL_TOKEN_MS * LOCAL_SLOWDOWN))
        slots = max(16, 1 << (len(self.batch) - 1).bit_length()) if self.batch else 16
        tokens += slots - (tokens + slots) % PASS_STEP - slots
        pressing = (backlog - PATIENT_TOKENS) // BACKLOG_STEPS
        fewest = max(int(LEAST_TURNS * FEWEST_PROMPT_TOKENS), min(FEWEST_PROMPT_TOKENS, fitting))
        return min(TOKEN_BUDGET, max(fewest, tokens, pressing))

    def has_room(self, run: Run) -> bool:
        return len(self.batch) < MAX_SEQUENCES and self.pool.num_free >= _blocks(run)

    def cached_blocks(self, run: Run) -> int:
        """Looking is no use: what is asked about is not evicted any later for it."""
        return self.pool.count_prefix(run.request.blocks)

    # -- what happens to it --------------------------------------------------------------------------------------------

    def advance(self, now_ms: float) -> None:
        """Let time go by; nothing ends before `now_ms`."""
        passed, self._at_ms = now_ms - self._at_ms, now_ms
        if self._step_rate or self._work_rate:
            self.busy_ms += passed
        self._steps += passed * self._step_rate
        self._context += passed * self._step_rate * len(self.batch)
        if self._has_begun:
            self.prompts[0].work_ms -= passed * self._work_rate

    def enqueue(self, run: Run) -> None:
        """A prompt, to be computed here."""
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
        """What is over now: (the prompt that was computed, the sequences that ended). Call `settle` afterwards."""
        computed, ended = None, []
        if self._has_begun and self.prompts[0].work_ms <= _EPSILON:
            computed = self._computed()
        while self.batch and self.batch[0][0] <= self._steps + _EPSILON:
            run = heapq.heappop(self.batch)[2]
            self._context -= run.request.prompt_tokens + run.request.answer_tokens
            ended.append(run)
        return computed, ended

    def settle(self) -> tuple[float, list[Run]]:
        """Begin what can begin: (ms until the next thing is over, sequences that found room)."""
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
        """Let go of the run's blocks; they stay cached."""
        self.pool.release(run.held.pop(self, []))

    # -- within --------------------------------------------------------------------------------------------------------

    def _hold(self, run: Run) -> bool:
        if self in run.held:
            return True
        if len(self.batch) >= MAX_SEQUENCES:
            return False
        matched = self.pool.match_prefix(run.request.blocks)
        try:
            rest = self.pool.allocate(_blocks(run) - len(matched))
        except OutOfBlocksError:
            self.pool.release(matched)
            return False
        run.held[self] = matched + rest
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
        matched = self.pool.match_prefix(run.request.blocks)
        needed = _blocks(run) if not run.decode else -(-run.request.prompt_tokens // TRACE_BLOCK)
        try:
            rest = self.pool.allocate(needed - len(matched))
        except OutOfBlocksError:
            self.pool.release(matched)
            return
        run.held[self] = matched + rest
        run.cached_tokens = min(len(matched) * TRACE_BLOCK, run.request.prompt_tokens - 1)
        run.work_ms = PREFILL_FIXED_MS + Chunk(run.cached_tokens, run.uncached).work_ms
        self.queued_tokens -= run.cached_tokens
        self._has_begun = True

    def _computed(self) -> Run:
        run = self.prompts.popleft()
        self._has_begun = False
        self.queued_tokens -= run.uncached
        work_ms = Chunk(run.cached_tokens, run.uncached).work_ms
        rate = run.uncached / work_ms
        if run.uncached >= FEWEST_PROMPT_TOKENS:
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
