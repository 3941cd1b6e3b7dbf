"""Places of a prompt's checkpoints, of which a client says where messages end."""

from __future__ import annotations

from engine.cache.block_pool import BlockPool
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.tables import groups_with
from worker.serving.checkpoints import branches_of

BLOCK, TOKENS = 4, 4_000


class Distance(float):
    """A distance that counts its comparisons."""

    compared = 0

    def __le__(self, other: float) -> bool:
        self.compared += 1
        return super().__le__(other)


def test_a_prompt_of_stop_tokens_alone_takes_two_comparisons_a_block_at_most() -> None:
    pool = BlockPool(num_blocks=16, block_size=BLOCK, groups=groups_with(BLOCK, state_blocks=2))
    pool.checkpoint_distance = least = Distance(4 * BLOCK)
    sequence = new_sequence("a", [7] * TOKENS, stop_token_ids=[7])
    places = branches_of(pool, sequence, cached=0, end=TOKENS - BLOCK)
    assert places[-1] == TOKENS - BLOCK
    assert {after - before for before, after in zip((0, *places), places, strict=False)} <= {16, 20, 24, 28}
    assert 0 < least.compared <= 2 * TOKENS // BLOCK + 4
