"""A request inside a worker: its tokens, its block table and how far its KV is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Owned and changed by the worker's loop alone; the engine only reads it during a step.

    Invariant: `num_computed <= len(token_ids)`, and the block table covers every computed position.
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
    num_cached: int = 0  # leading tokens whose KV came from the prefix cache
    digests: list[bytes] = field(default_factory=list)  # of the leading full blocks published so far

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens so far, across attempts: the position of the next sampled one."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Add a sampled token; its KV is computed by the next step."""
        self.token_ids.append(token_id)

    def blocks_needed(self, num_tokens: int, block_size: int) -> int:
        """Blocks that the table lacks to cover `num_tokens` positions; 0 if it covers them."""
        return max(0, -(-num_tokens // block_size) - len(self.block_table))

    def finish_reason(self) -> str:
        """Return "stop" after a stop token, "length" at `max_tokens`, "" while it goes on."""
        if self.num_generated > 0 and self.token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.num_generated >= self.sampling.max_tokens else ""
