"""vLLM's scheduling as a yardstick (release 0.33, V1, defaults of its server on cards of this size), on the same device and pool.

A pass has a fixed budget of tokens, whatever streams beside them want. Running requests come first, in the order in which they
were admitted, so a prompt that was begun goes on behind most streams; what is left goes to waiting prompts, first come, first
served, cut where the budget ends. A prompt is admitted when blocks for all of it are free. Without blocks to grow the request
admitted last is preempted, and computes its tokens again from the front of the queue; nobody is admitted in that pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from benchmarks.load.device import MAX_SEQUENCES, PassCosts
from benchmarks.load.model import MAX_MODEL_LEN, Clock, Policy, Scheduler
from decode.request import DecodeRequest
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.engine import Chunk
from engine.sequence import Sequence
from worker.device.prompt_budget import PromptBudget
from worker.serving.allocation import HeldBlocks, admit, grow

TOKEN_BUDGET = 8192  # `max_num_batched_tokens` of its server on cards with 70 GiB and more
ANY_NUMBER = 1_000_000


class FirstComeScheduler:
    """The running requests in the order of their admission, and the queue."""

    def __init__(self, pool: BlockPool, *, token_budget: int = TOKEN_BUDGET) -> None:
        self.preemptions = 0
        self._pool, self._token_budget = pool, token_budget
        self._running: list[DecodeRequest] = []
        self._waiting: deque[DecodeRequest] = deque()
        self._blocks = HeldBlocks(pool)
        self._in_flight: dict[Sequence, DecodeRequest] = {}

    def __iter__(self) -> Iterator[DecodeRequest]:
        yield from self._running
        yield from self._waiting

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    def enqueue(self, request: DecodeRequest) -> None:
        """Add a request at the end of the queue."""
        self._waiting.append(request)

    def remove(self, request: DecodeRequest) -> None:
        """Remove a request that ended."""
        (self._running if request in self._running else self._waiting).remove(request)
        self._blocks.give_back(request.sequence)

    def landed(self, chunk: Chunk) -> DecodeRequest:
        """Record the end of the chunk's pass."""
        request = self._in_flight[chunk.sequence]
        self._blocks.landed(chunk.sequence)
        if not self._blocks.in_use(chunk.sequence):
            del self._in_flight[chunk.sequence]
        return request

    def plan(self, token_budget: int) -> list[Chunk]:
        """Plan the next pass."""
        left, shares = min(token_budget, self._token_budget), dict[DecodeRequest, int]()
        is_short = False
        for request in [one for one in self._running if _goes_on(one)]:
            if not left or request not in self._running:
                continue
            num_tokens = min(request.sequence.num_next, left)
            if self._grows(request, num_tokens):
                shares[request] = num_tokens
                left -= num_tokens
            else:
                is_short = True
        while not is_short and left and self._waiting and len(self._running) < MAX_SEQUENCES:
            if not self._admits(request := self._waiting[0]):
                break
            self._running.append(self._waiting.popleft())
            shares[request] = min(request.sequence.num_next, left)
            left -= shares[request]
        return [self._schedule(request, num_tokens) for request, num_tokens in shares.items()]

    def _admits(self, request: DecodeRequest) -> bool:
        try:
            admit(self._pool, request.sequence, num_tokens=len(request.sequence.token_ids))
        except OutOfBlocksError:
            return False
        return True

    def _grows(self, request: DecodeRequest, num_tokens: int) -> bool:
        """Cover the chunk with blocks, preempting the last ones; False if the request waits for blocks, or gave up its own."""
        while request in self._running:
            try:
                grow(self._pool, request.sequence, num_tokens=request.sequence.num_scheduled + num_tokens)
                return True
            except OutOfBlocksError:
                last = self._running[-1]
            if self._blocks.in_use(last.sequence):  # its blocks come back with the pass in flight
                return False
            self._running.pop()
            self._blocks.give_back(last.sequence)
            self._waiting.appendleft(last)
            self.preemptions += 1
        return False

    def _schedule(self, request: DecodeRequest, num_tokens: int) -> Chunk:
        self._blocks.launched(request.sequence)
        self._in_flight[request.sequence] = request
        return request.sequence.schedule(num_tokens)


def _goes_on(request: DecodeRequest) -> bool:
    """True if the request has a token to compute that no pass in flight ends it before."""
    sequence = request.sequence
    if not sequence.num_unscheduled:
        return False
    return sequence.num_generated + sequence.num_pending < sequence.sampling.max_tokens and (
        sequence.num_tokens < MAX_MODEL_LEN
    )


def vllm() -> Policy:
    """The yardstick. Its server queues whatever comes."""
    return Policy("vLLM's", build=_first_come, room=lambda _: ANY_NUMBER, budget=_unused)


def _first_come(pool: BlockPool, budget: PromptBudget, clock: Clock) -> Scheduler:
    return FirstComeScheduler(pool)


def _unused(costs: PassCosts) -> PromptBudget:
    return PromptBudget(token_budget=TOKEN_BUDGET, target_ms=0.0, pass_ms=costs.pass_ms())
