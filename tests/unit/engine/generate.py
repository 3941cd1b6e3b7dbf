"""The smallest loop around an engine: admit, chunk, step, append, publish. What a worker does, without one."""

from __future__ import annotations

from collections.abc import Iterable

from common.blocks import hash_blocks, hash_root
from common.messages import SamplingParams
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk, Engine, Pass, Sampled
from engine.sequence import Sequence

ROOT = hash_root(model="tiny", kv_dtype="float32", block_size=16)


def new_sequence(request_id: str, prompt: list[int], **sampling: object) -> Sequence:
    """A greedy sequence of 12 tokens unless `sampling` says otherwise."""
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | sampling))  # type: ignore[arg-type]
    return Sequence(
        request_id=request_id,
        attempt=1,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=params,
        hash_root=ROOT,
    )


class Generator:
    """Runs sequences to their end, all in one batch, each with at most `chunk_size` tokens a step."""

    def __init__(self, engine: Engine, *, chunk_size: int = 512) -> None:
        self.pool = BlockPool(num_blocks=engine.layout.num_blocks, block_size=engine.layout.block_size)
        self.results: dict[str, list[Sampled | None]] = {}  # request id -> everything its sampling chunks got
        self.launch = engine.launch
        self._chunk_size = chunk_size

    def run(self, sequences: Iterable[Sequence]) -> list[list[int]]:
        """Return each sequence's generated tokens."""
        sequences = list(sequences)
        for sequence in sequences:
            self.admit(sequence)
        self.go_on(sequences)
        for sequence in sequences:
            self._publish(sequence)
            self.pool.release(sequence.block_table)
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]

    def start(self, sequence: Sequence) -> None:
        """Admit a sequence and compute its prompt and first token."""
        self.admit(sequence)
        self.go_on([sequence], num_tokens=1)

    def go_on(self, sequences: list[Sequence], *, num_tokens: int | None = None) -> None:
        """Advance admitted sequences to their end, or until each has generated `num_tokens`."""
        while running := [
            sequence
            for sequence in sequences
            if not self._is_over(sequence) and (num_tokens is None or sequence.num_generated < num_tokens)
        ]:
            self._advance(running)

    def _is_over(self, sequence: Sequence) -> bool:
        return bool(sequence.finish_reason()) or None in self.results.get(sequence.request_id, [])

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence its cached prefix and blocks for all that it may generate."""
        size = self.pool.block_size
        digests = hash_blocks(ROOT, sequence.token_ids[:-1], size)
        sequence.block_table = self.pool.match_prefix(digests)
        sequence.num_cached = len(sequence.block_table) * size
        sequence.restart(sequence.num_cached)
        end = sequence.num_tokens + sequence.sampling.max_tokens
        sequence.block_table += self.pool.allocate(sequence.blocks_needed(end, size))

    def _advance(self, running: list[Sequence]) -> None:
        chunks = [sequence.schedule(min(sequence.num_unscheduled, self._chunk_size)) for sequence in running]
        self.deliver(chunks, self.launch(chunks))

    def deliver(self, chunks: list[Chunk], pass_: Pass) -> None:
        """Wait for a pass and give each sequence its result."""
        for chunk, sampled in zip(chunks, pass_.wait(), strict=True):
            chunk.sequence.finish(chunk)
            if chunk.sample:
                self.results.setdefault(chunk.sequence.request_id, []).append(sampled)
                if sampled is not None:
                    chunk.sequence.append(sampled.token_id)

    def _publish(self, sequence: Sequence) -> None:
        digests = hash_blocks(ROOT, sequence.token_ids[: sequence.num_computed], self.pool.block_size)
        for block, digest in zip(sequence.block_table, digests, strict=False):
            self.pool.publish(block, digest)
