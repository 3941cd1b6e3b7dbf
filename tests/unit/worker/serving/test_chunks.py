"""The states behind drafted tokens: one entry each while a pass verifies them, and none where blocks are short."""

from __future__ import annotations

import pytest

from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.tables import groups_with
from worker.serving.allocation import HeldBlocks, admit
from worker.serving.chunks import finish, schedule

BLOCK, STATE = 4, 2  # a checkpoint each 16 tokens
DRAFT = (7, 7, 7)


def _decoding(pool: BlockPool, num_tokens: int) -> Sequence:
    """A sequence whose tokens are computed, but the last."""
    sequence = new_sequence("a", list(range(num_tokens)))
    admit(pool, sequence, num_tokens=num_tokens + 8)
    finish(pool, schedule(pool, sequence, num_tokens - 1))
    return sequence


@pytest.mark.parametrize("num_accepted", range(len(DRAFT) + 1))
def test_a_sequence_goes_on_from_the_state_behind_the_accepted_tokens(num_accepted: int) -> None:
    pool = BlockPool(num_blocks=40, block_size=BLOCK, groups=groups_with(BLOCK, state_blocks=STATE))
    sequence = _decoding(pool, 7)
    used, states = pool.num_used, sequence.tables[1]
    chunk = schedule(pool, sequence, 1, drafted=DRAFT)
    assert (len(states.behind), pool.num_used) == (3, used + 3 * STATE)
    wanted = states.left(1, num_accepted)
    for _ in range(num_accepted + 1):
        sequence.append(7)
    finish(pool, chunk, num_accepted)
    own = 2 if num_accepted > 1 else 1  # the state at the end of the second block is a checkpoint
    assert (set(states.entries[own:]), states.behind, pool.num_used) == ({wanted}, [], used)
    assert sequence.num_computed == 7 + num_accepted
    HeldBlocks(pool).give_back(sequence)
    assert pool.num_used == 0
    again = new_sequence("b", [*sequence.token_ids, 5])
    admit(pool, again, num_tokens=len(again.token_ids))
    assert again.num_cached == own * BLOCK


@pytest.mark.parametrize(("num_tokens", "drafted"), [(12, 3), (13, 3), (14, 2), (15, 1), (16, 0), (17, 3)])
def test_a_draft_ends_before_the_next_checkpoint(num_tokens: int, drafted: int) -> None:
    pool = BlockPool(num_blocks=40, block_size=BLOCK, groups=groups_with(BLOCK, state_blocks=STATE))
    sequence = _decoding(pool, num_tokens)
    assert schedule(pool, sequence, 1, drafted=DRAFT).drafted == DRAFT[:drafted]


@pytest.mark.parametrize(("free", "drafted"), [(0, 0), (1, 0), (2, 1), (5, 2), (6, 3)])
def test_a_draft_takes_free_blocks_alone(free: int, drafted: int) -> None:
    pool = BlockPool(num_blocks=40, block_size=BLOCK, groups=groups_with(BLOCK, state_blocks=STATE))
    sequence = _decoding(pool, 7)
    chunk = schedule(pool, sequence, 1, drafted=DRAFT, spare=pool.num_free - free)
    assert chunk.drafted == DRAFT[:drafted]
    assert not sequence.tables[0].behind
