"""Sequences and the block pool: take blocks, share finished ones, give all of them back."""

from __future__ import annotations

from collections import Counter

from common.blocks import hash_block, hash_blocks, unpack_tokens
from common.messages import Job
from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence


def sequence_of(job: Job) -> Sequence:
    """The sequence that a job describes, without blocks."""
    return Sequence(
        request_id=job.request_id,
        attempt=job.attempt,
        token_ids=unpack_tokens(job.token_ids),
        num_prompt_tokens=job.num_prompt_tokens,
        sampling=job.sampling,
        hash_root=job.hash_root,
        suspect_until=job.suspect_until,
        grammar=job.grammar,
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def admit(pool: BlockPool, sequence: Sequence, *, num_tokens: int, spare: int = 0) -> None:
    """Give an empty sequence its cached prefix and fresh blocks for `num_tokens` positions in all.

    At least the last known token is left to compute, for its logits; a scored prompt is computed whole. `spare` blocks stay free
    or cached. Raises OutOfBlocksError and takes nothing.
    """
    size = pool.block_size
    reusable = (len(sequence.token_ids) - 1) // size
    digests = hash_blocks(sequence.hash_root, sequence.token_ids[: reusable * size], size)
    cached = [] if sequence.scores_prompt else pool.match_prefix(digests)
    try:
        fresh = pool.allocate(blocks_for(num_tokens, size) - len(cached), spare=spare)
    except Exception:
        pool.release(cached)
        raise
    sequence.block_table = cached + fresh
    sequence.digests, sequence.known_digests = digests[: len(cached)], digests
    sequence.num_cached = len(cached) * size
    sequence.restart(sequence.num_cached)


def grow(pool: BlockPool, sequence: Sequence, *, num_tokens: int) -> None:
    """Extend the block table to cover `num_tokens` positions. Raises OutOfBlocksError and takes nothing."""
    missing = blocks_for(num_tokens, pool.block_size) - len(sequence.block_table)
    if missing > 0:
        sequence.block_table.extend(pool.allocate(missing))


def publish_computed(pool: BlockPool, sequence: Sequence) -> None:
    """Share every block that finished passes filled and whose tokens are known."""
    size = pool.block_size
    num_final = min(sequence.num_computed, len(sequence.token_ids))
    while (len(sequence.digests) + 1) * size <= num_final:
        index = len(sequence.digests)
        if index < len(sequence.known_digests):
            digest = sequence.known_digests[index]
        else:
            parent = sequence.digests[-1] if sequence.digests else sequence.hash_root
            digest = hash_block(parent, sequence.token_ids[index * size : (index + 1) * size])
        sequence.digests.append(digest)
        pool.publish(sequence.block_table[index], digest)


class HeldBlocks:
    """Gives blocks back, but never while a pass in flight may write to them.

    The planner reports a sequence's passes (`launched`, `landed`). Blocks given back in between go to the pool with the last
    of these passes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._passes: Counter[Sequence] = Counter()  # passes in flight by sequence
        self._leaving: set[Sequence] = set()

    @property
    def awaited(self) -> int:
        """Sequences whose blocks go back when their passes are over."""
        return len(self._leaving)

    @property
    def leaving(self) -> list[Sequence]:
        return list(self._leaving)

    def in_use(self, sequence: Sequence) -> bool:
        return sequence in self._passes

    def launched(self, sequence: Sequence) -> None:
        """One more pass has the sequence."""
        self._passes[sequence] += 1

    def landed(self, sequence: Sequence) -> None:
        """One of these passes is over, with or without a result."""
        self._passes[sequence] -= 1
        if not self._passes[sequence]:
            del self._passes[sequence]
            if sequence in self._leaving:
                self._leaving.remove(sequence)
                self._release(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Drop every reference of the sequence, now or when its passes are over. Published blocks stay cached."""
        if self.in_use(sequence):
            self._leaving.add(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.digests = []
        sequence.restart(0)
