"""What decoding sequences read and write is kept from pass to pass, and is at any time what it would be without."""

from __future__ import annotations

import random

import pytest

from engine.groups import Table
from engine.kernels.attention import HeadShape, Tiling
from engine.passes import InvalidChunkError
from engine.sequence import Chunk, Sequence
from engine.step.limits import GroupTables, HeadLimits, LastAttention, Limits
from engine.step.states import DecodingStates
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.tables import groups_with

BLOCKS, SIZE = 3, 4
HEADS = HeadLimits(HeadShape(16, 4, 64), (0,), items_at_once=66, item_queries=4, tiling=Tiling(64, 128))
LIMITS = Limits(
    block_size=4,
    num_blocks=1000,
    vocab_size=500,
    max_model_len=512,
    attention=(HEADS,),
    last=LastAttention(HEADS, window=0),
    tables=GroupTables(groups_with(4, state_blocks=BLOCKS)),
)


def sequence_at(position: int, blocks: tuple[int, ...]) -> Sequence:
    sequence = new_sequence("r", [5] * 200)
    table = Table([()] * (max(0, position - 1) // SIZE))
    table.entries += [blocks] * (200 // SIZE - len(table.entries))
    sequence.tables = [Table(), table]
    sequence.restart(position)
    return sequence


def moves_of(kept: DecodingStates, chunks: list[Chunk]) -> list[object]:
    return kept.moves(chunks, LIMITS).tolist()


def by_hand(chunks: list[Chunk]) -> list[object]:
    def block(chunk: Chunk, position: int, index: int) -> int:
        return chunk.sequence.tables[1].entries[position // SIZE][index] if position >= 0 else -1

    return [
        [[block(chunk, chunk.start - 1, index), block(chunk, chunk.start, index)] for chunk in chunks]
        for index in range(BLOCKS)
    ]


def test_what_is_kept_is_what_would_be_found_anew() -> None:
    """Sequences come, leave, begin, go on in other blocks, and are resumed in theirs at another place."""
    chance, kept = random.Random(7), DecodingStates()
    free = iter(range(0, 999, BLOCKS))

    def new_blocks() -> tuple[int, ...]:
        first = next(free)
        return (first, first + 1, first + 2)

    sequences = [sequence_at(position, new_blocks()) for position in (0, 0, 1, 30)]
    for _ in range(150):
        for sequence in sequences:
            entries, at = sequence.tables[1].entries, sequence.num_scheduled
            match chance.randrange(40):
                case 0 if at % SIZE == 0:
                    entries[at // SIZE :] = [new_blocks()] * (len(entries) - at // SIZE)
                case 1:
                    entries[at // SIZE :] = [new_blocks()] * (len(entries) - at // SIZE)
                case 2:
                    sequence.restart(chance.choice([at, max(0, at - 1)]) if entries[max(0, at - 2) // SIZE] else at)
        if not chance.randrange(8):
            sequences.append(sequence_at(chance.choice((0, 9)), new_blocks()))
        if not chance.randrange(8):
            sequences.remove(chance.choice(sequences))
        sequences = [sequence for sequence in sequences if sequence.num_scheduled < 199]
        chunks = [sequence.schedule(1) for sequence in sequences]
        assert moves_of(kept, chunks) == by_hand(chunks)


@pytest.mark.parametrize("blocks", [(1, 2), (1, 2, 1000), (-1, 2, 3)])
def test_blocks_that_are_no_states_are_refused(blocks: tuple[int, ...]) -> None:
    kept, good = DecodingStates(), sequence_at(8, (1, 2, 3))
    moves_of(kept, [good.schedule(1)])
    with pytest.raises(InvalidChunkError, match="not 3 in"):
        moves_of(kept, [good.schedule(1), sequence_at(8, blocks).schedule(1)])
    assert moves_of(kept, chunks := [good.schedule(1)]) == by_hand(chunks)
