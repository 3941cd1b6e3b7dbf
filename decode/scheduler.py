"""Continuous batching: which sequences get tokens in the next pass, and who gives way when blocks run out.

Order of a pass: every running sequence that decodes gets its token; what is left of the budget goes to prompts that are
computed here (local prefill, or a preempted sequence again), oldest first; then waiting sequences are admitted. When a
sequence can't grow, the youngest of the lowest priority is preempted: its blocks go back (full ones stay cached) and it
waits at the front of the queue to be computed again. Sampling depends on (seed, position) alone, so its text goes on as
it would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from decode.request import DecodeRequest
from engine.block_pool import BlockPool, OutOfBlocksError
from engine.engine import Chunk
from worker.prefix import admit, blocks_for, grow, surrender


class DecodeScheduler:
    """Owns the order of the sequences, and through the pool their blocks. Called between passes only."""

    def __init__(self, *, pool: BlockPool, max_sequences: int) -> None:
        self._pool = pool
        self._max_sequences = max_sequences
        self.running: list[DecodeRequest] = []  # hold blocks, in order of arrival
        self.waiting: deque[DecodeRequest] = deque()  # hold none
        self.preemptions = 0

    def __iter__(self) -> Iterator[DecodeRequest]:
        yield from self.running
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def join(self, request: DecodeRequest) -> None:
        """Add a sequence that holds its blocks already (a hand-over)."""
        self.running.append(request)

    def enqueue(self, request: DecodeRequest) -> None:
        """Add a sequence without blocks (local prefill)."""
        self.waiting.append(request)

    def remove(self, request: DecodeRequest) -> None:
        """Take a sequence out and give its blocks back. Unknown ones are none of our business."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        surrender(self._pool, request.sequence)

    def plan(self, token_budget: int) -> list[Chunk]:
        """Choose the next pass. Every chunk's positions are covered by its block table."""
        preempted_before = self.preemptions
        chunks: dict[DecodeRequest, Chunk] = {}
        for request in sorted(self.running, key=lambda request: request.num_missing > 1):  # stable: decoding ones first
            num_tokens = min(request.num_missing, token_budget)
            if num_tokens > 0 and request in self.running and self._make_room(request, num_tokens, chunks):
                chunks[request] = _chunk(request, num_tokens)
                token_budget -= num_tokens
        if self.preemptions == preempted_before:
            self._admit_waiting(token_budget, chunks)
        return list(chunks.values())

    def _admit_waiting(self, token_budget: int, chunks: dict[DecodeRequest, Chunk]) -> None:
        while self.waiting and token_budget > 0 and len(self.running) < self._max_sequences:
            request = self.waiting[0]
            num_positions = len(request.sequence.token_ids) + 1
            room_to_grow = len(self.running)  # a block for each running sequence comes first
            if self._pool.num_free < blocks_for(num_positions, self._pool.block_size) + room_to_grow:
                return
            admit(self._pool, request.sequence, num_tokens=num_positions)
            self.waiting.popleft()
            self.running.append(request)
            num_tokens = min(request.num_missing, token_budget)
            chunks[request] = _chunk(request, num_tokens)
            token_budget -= num_tokens

    def _make_room(self, request: DecodeRequest, num_tokens: int, chunks: dict[DecodeRequest, Chunk]) -> bool:
        """Cover the chunk with blocks, preempting others if need be; False if the request itself had to give way."""
        while True:
            try:
                grow(self._pool, request.sequence, num_tokens=request.sequence.num_computed + num_tokens)
                return True
            except OutOfBlocksError:
                victim = self._victim()
                chunks.pop(victim, None)
                self._preempt(victim)
                if victim is request:
                    return False

    def _victim(self) -> DecodeRequest:
        youngest_first = reversed(self.running)
        return min(youngest_first, key=lambda request: request.job.priority)

    def _preempt(self, request: DecodeRequest) -> None:
        self.running.remove(request)
        surrender(self._pool, request.sequence)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)


def _chunk(request: DecodeRequest, num_tokens: int) -> Chunk:
    return Chunk(sequence=request.sequence, num_tokens=num_tokens, sample=num_tokens == request.num_missing)
