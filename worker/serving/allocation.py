"""Block allocation of sequences: take blocks, publish finished ones, return all.

Where the model keeps states, a sequence has blocks for one more. It leaves a checkpoint behind by going on in other blocks, so
nothing is copied; the checkpoint stays in the cache while there is room for it. What layers with a window keep is in columns
(`worker.serving.columns`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from common.blocks import hash_block, hash_blocks, unpack_tokens
from common.messages import Job
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.sequence import Chunk, Sequence, State
from worker.serving.columns import extend, has_room_of_its_own, let_go, num_columns, tokens_and_columns
from worker.serving.turns import Turns

# Tokens between checkpoints along a sequence, and at least between any two. The unit: tokens that a state's blocks would hold.
CHECKPOINT_EVERY = 2.0
LEAST_CHECKPOINT = 0.25


def sequence_of(job: Job) -> Sequence:
    """The sequence of a job, without blocks."""
    work = job.work
    return Sequence(
        request_id=job.request_id,
        attempt=job.attempt,
        token_ids=unpack_tokens(job.token_ids),
        num_prompt_tokens=job.num_prompt_tokens,
        sampling=work.sampling,
        hash_root=job.hash_root,
        suspect_until=job.suspect_until,
        grammar=work.grammar,
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def admit(pool: BlockPool, sequence: Sequence, *, num_tokens: int, spare: int = 0, ahead: int | None = None) -> None:
    """Give an empty sequence its cached prefix, and fresh blocks for `num_tokens` positions in all.

    At least the last known token is left to compute, for its logits; a scored prompt is computed whole. It gets columns for
    `ahead` positions (None: all), see `num_columns`. `spare` blocks stay free or cached. Raises OutOfBlocksError and takes
    nothing.
    """
    size = pool.block_size
    reusable = (len(sequence.token_ids) - 1) // size
    digests = hash_blocks(sequence.hash_root, sequence.token_ids[: reusable * size], size)
    cached, beside = pool.match_usable([] if sequence.scores_prompt else digests)
    num_blocks = blocks_for(num_tokens, size)
    if beside and not has_room_of_its_own(pool, num_blocks, cached=len(cached), seen=len(beside)):
        pool.release([*cached, *chain(*beside)])
        cached, beside = [], []
    state = beside[0] if pool.state_blocks and beside else ()
    num_fresh = num_columns(pool, num_blocks, ahead, cached=len(cached), seen=len(beside), spare=spare)
    wanted = num_blocks - len(cached) + pool.state_blocks + num_fresh * pool.column_blocks
    own: tuple[int, ...] = ()
    if state and pool.num_free < wanted + spare <= pool.num_free + len(state) and pool.make_private(state):
        own, beside = state, []  # without room for another state it continues in the checkpoint
    try:
        fresh = iter(pool.allocate(wanted - len(own), spare=spare))
    except OutOfBlocksError:
        # Recomputing from zero needs as many: its released blocks are held by others or needed again.
        pool.release([*cached, *chain(*beside)])
        raise
    own = own or _take(fresh, pool.state_blocks)
    sequence.block_table = [*cached, *_take(fresh, num_blocks - len(cached))]
    if pool.column_blocks:
        known = [()] * (len(cached) - len(beside)) + beside
        sequence.columns = known + [_take(fresh, pool.column_blocks) for _ in range(num_fresh)]
        sequence.num_shared_columns = len(cached)
    sequence.digests, sequence.known_digests = digests[: len(cached)], digests
    sequence.found(len(cached) * size)
    sequence.restart(sequence.num_cached)
    if pool.state_blocks:
        found = [State(sequence.num_cached - 1, sequence.num_cached, each, is_found=True) for each in beside]
        # Other blocks start with the next token; a checkpoint that is written again already holds the last cached token.
        begin = sequence.num_cached if found else max(0, sequence.num_cached - 1)
        sequence.states = (*found, State(begin, None, own))
        # Others may branch where this sequence left the cached prefix, and resume where it ends.
        sequence.checkpoints = (pool.count_prefix(digests) * size, len(digests) * size)


def admit_in_turn(
    pool: BlockPool, turns: Turns, sequence: Sequence, *, num_tokens: int, spare: int, ahead: int
) -> bool:
    """Admit the sequence without touching blocks kept for requests that are due; without room it waits, and return False."""
    try:
        admit(pool, sequence, num_tokens=num_tokens, spare=spare + turns.kept_from(sequence), ahead=ahead)
    except OutOfBlocksError:
        needed = needs(pool, num_tokens=num_tokens, ahead=ahead, spare=spare)
        turns.waits(sequence, blocks=max(needed + spare, pool.num_free + 1))
        return False
    turns.admitted(sequence)
    return True


def needs(pool: BlockPool, *, num_tokens: int, ahead: int, spare: int) -> int:
    """Free blocks, besides `spare` ones, that `admit` needs for a sequence without a prefix hit."""
    num_blocks = blocks_for(num_tokens, pool.block_size)
    columns = num_columns(pool, num_blocks, ahead, cached=0, seen=0, spare=spare)
    return num_blocks + columns * pool.column_blocks + pool.state_blocks


def _take(blocks: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(islice(blocks, count))


def receive_state(sequence: Sequence, blocks: list[int]) -> None:
    """Give a sequence the recurrent state after its known tokens, which another worker computed."""
    sequence.states = (State(len(sequence.token_ids) - 1, None, tuple(blocks)),) if blocks else ()


def schedule(pool: BlockPool, sequence: Sequence, num_tokens: int, *, spare: int = 0) -> Chunk:
    """Schedule the next positions for a pass, leaving checkpoints if more than `spare` blocks remain."""
    if pool.state_blocks:
        _leave_checkpoints(pool, sequence, sequence.num_scheduled + num_tokens, spare=spare)
    return sequence.schedule(num_tokens)


def _leave_checkpoints(pool: BlockPool, sequence: Sequence, end: int, *, spare: int) -> None:
    """Switch to other state blocks after each boundary below `end`. Without room there is no checkpoint."""
    every, least = checkpoint_distance(pool), LEAST_CHECKPOINT * pool.state_blocks * pool.block_size
    begin, wanted = sequence.num_scheduled, sequence.checkpoints
    places = [at for at in wanted if begin <= at < end]
    for at in range(-(-begin // every) * every, end, every):
        if not any(0 <= other - at < least for other in wanted):
            places.append(at)
    for at in sorted(places):
        if at - sequence.states[-1].begin >= least:
            leave_checkpoint(pool, sequence, at, spare=spare)


def checkpoint_distance(pool: BlockPool) -> int:
    """Tokens between two regular checkpoints of a sequence."""
    return int(CHECKPOINT_EVERY * pool.state_blocks * pool.block_size)


def leave_checkpoint(pool: BlockPool, sequence: Sequence, at: int, *, spare: int) -> None:
    """Switch to other state blocks after the first `at` tokens, if more than `spare` blocks remain."""
    state = sequence.states[-1]
    if at <= state.begin:
        return
    try:
        blocks = pool.allocate(pool.state_blocks, spare=spare)
    except OutOfBlocksError:
        return
    sequence.states = (*sequence.states[:-1], replace(state, end=at), State(at, None, tuple(blocks)))


def grow(pool: BlockPool, sequence: Sequence, *, num_tokens: int) -> None:
    """Extend block table and columns to cover `num_tokens` positions. Raises OutOfBlocksError and takes nothing."""
    missing = lacks(pool, sequence, num_tokens=num_tokens)
    if not missing:
        return
    fresh, num_blocks = iter(pool.allocate(missing)), blocks_for(num_tokens, pool.block_size)
    sequence.block_table.extend(_take(fresh, max(0, num_blocks - len(sequence.block_table))))
    if pool.column_blocks:
        extend(sequence, list(fresh), pool.column_blocks)


def lacks(pool: BlockPool, sequence: Sequence, *, num_tokens: int) -> int:
    """Number of blocks that a sequence must take to cover `num_tokens` positions."""
    num_blocks = blocks_for(num_tokens, pool.block_size)
    missing = max(0, num_blocks - len(sequence.block_table))
    return missing + pool.column_blocks * max(0, num_blocks - len(sequence.columns)) if pool.column_blocks else missing


def publish_computed(pool: BlockPool, sequence: Sequence) -> None:
    """Publish every full block whose passes are over and whose tokens are known; release columns outside the window."""
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
    if pool.column_blocks:
        let_go(pool, sequence)
    while sequence.states and (end := sequence.states[0].end) is not None and end < sequence.num_computed:
        # The pass that resumed from it is over, so it is final and no other pass reads it.
        passed, *left = sequence.states
        sequence.states = tuple(left)
        if not passed.is_found:
            pool.publish_beside(passed.blocks, sequence.digests, end // size)
        pool.release(passed.blocks)


def withdraw(pool: BlockPool, sequence: Sequence) -> None:
    """Unpublish the blocks of a sequence whose results proved wrong, or everybody with its prefix would fail."""
    pool.withdraw([*tokens_and_columns(sequence), *_state_blocks(sequence)], sequence.digests)


def _state_blocks(sequence: Sequence) -> list[int]:
    return [block for state in sequence.states for block in state.blocks]


class HeldBlocks:
    """Deferred release of blocks: never while a pass in flight may write to them.

    The planner reports a sequence's passes (`launched`, `landed`). Blocks given back in between go to the pool with the last
    of these passes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._passes: Counter[Sequence] = Counter()  # passes in flight by sequence
        self._leaving: set[Sequence] = set()

    @property
    def awaited(self) -> int:
        """Sequences whose blocks are released when their passes end."""
        return len(self._leaving)

    @property
    def leaving(self) -> list[Sequence]:
        return list(self._leaving)

    def in_use(self, sequence: Sequence) -> bool:
        return sequence in self._passes

    def launched(self, sequence: Sequence) -> None:
        """Count a pass that includes the sequence."""
        self._passes[sequence] += 1

    def landed(self, sequence: Sequence) -> None:
        """Record the end of a pass of the sequence, with or without a result."""
        self._passes[sequence] -= 1
        if not self._passes[sequence]:
            del self._passes[sequence]
            if sequence in self._leaving:
                self._leaving.remove(sequence)
                self._release(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Drop every reference of the sequence, now or when its passes end. Published blocks stay cached."""
        if self.in_use(sequence):
            self._leaving.add(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release([*tokens_and_columns(sequence), *_state_blocks(sequence)])
        sequence.block_table, sequence.columns = [], []
        sequence.states = ()
        sequence.digests = []
        sequence.restart(0)
