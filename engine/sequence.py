"""A request inside a worker: its tokens, its block table and how far its KV is computed; and its share of a pass.

Passes overlap: while the device computes one, the next is planned. A sequence therefore knows three frontiers:

    num_computed <= num_scheduled <= len(token_ids) + num_pending
    (finished passes)  (launched too)      (tokens that a pass in flight will sample count as known)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Sequence:
    """Owned and changed by the worker's event loop alone; the engine reads it, by a chunk's positions, in its own thread.

    The block table covers every scheduled position, and keeps its entries while a pass with the sequence is in flight.
    """

    request_id: str
    attempt: int
    token_ids: list[int]  # prompt and generated
    num_prompt_tokens: int
    sampling: SamplingParams
    hash_root: bytes
    block_table: list[int] = field(
        default_factory=list
    )  # entry i holds positions [i * block_size, (i + 1) * block_size)
    num_computed: int = 0  # leading tokens whose KV is in the pool
    num_scheduled: int = 0  # leading tokens whose KV is in the pool or computed by a pass in flight
    num_pending: int = 0  # tokens that passes in flight sample: one for each that reaches the sequence's end
    num_cached: int = 0  # leading tokens whose KV came from the prefix cache
    digests: list[bytes] = field(default_factory=list)  # of the leading full blocks published so far
    known_digests: list[bytes] = field(default_factory=list)  # of leading full blocks, hashed at admission
    suspect_until: int = 0  # generated tokens; see `worker.trials`

    @property
    def num_tokens(self) -> int:
        """Known tokens and those that a pass in flight samples."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_unscheduled(self) -> int:
        """Tokens whose KV no pass computes yet."""
        return self.num_tokens - self.num_scheduled

    @property
    def num_generated(self) -> int:
        """Known generated tokens, across attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_suspect(self) -> bool:
        """Whether it may have killed a worker, and has not got further than there yet."""
        return self.num_generated < self.suspect_until

    def schedule(self, num_tokens: int) -> Chunk:
        """Make the next `num_tokens` positions part of a pass; the one that reaches the last token samples the next."""
        chunk = Chunk(
            sequence=self,
            start=self.num_scheduled,
            num_tokens=num_tokens,
            sample=self.num_scheduled + num_tokens == self.num_tokens,
        )
        self.num_scheduled = chunk.end
        self.num_pending += chunk.sample
        return chunk

    def finish(self, chunk: Chunk) -> None:
        """A pass with `chunk` is over: its KV is in the pool. A sampled token is given to `append`."""
        self.num_computed = max(self.num_computed, chunk.end)

    def append(self, token_id: int) -> None:
        """Add a sampled token; its KV is computed by the next pass."""
        self.token_ids.append(token_id)
        self.num_pending = max(0, self.num_pending - 1)

    def restart(self, num_computed: int) -> None:
        """Only the first `num_computed` positions are in the pool, and no pass is in flight."""
        self.num_computed = self.num_scheduled = num_computed
        self.num_pending = 0

    def blocks_needed(self, num_tokens: int, block_size: int) -> int:
        """Blocks that the table lacks to cover `num_tokens` positions; 0 if it covers them."""
        return max(0, -(-num_tokens // block_size) - len(self.block_table))

    def finish_reason(self) -> str:
        """Return "stop" after a stop token, "length" at `max_tokens`, "" while it goes on."""
        if self.num_generated > 0 and self.token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_generated >= self.sampling.max_tokens else ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a pass: positions [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int
    sample: bool  # the chunk ends at the last token: sample the next one

    @property
    def end(self) -> int:
        """Position behind the chunk: the context length after it."""
        return self.start + self.num_tokens

    @property
    def sampled_index(self) -> int:
        """How many generated tokens come before the one that this chunk samples: the counter of its random numbers."""
        return self.end - self.sequence.num_prompt_tokens
