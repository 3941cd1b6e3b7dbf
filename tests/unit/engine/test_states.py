"""States in blocks: any size of blocks gives the same answers, and a full block never changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from tests.unit.engine.families import hybrids
from tests.unit.engine.generate import Generator, new_sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrids.CASES[0].build(tmp_path_factory.mktemp("hybrid"))


def prompt_of(length: int) -> list[int]:
    return [(31 * length + 7 * at + at * at) % 480 + 5 for at in range(length)]


def engine_of(folder: Path, block_size: int) -> Engine:
    def full_of_nan(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.full(shape, 255, dtype=dtype, device=device)  # all ones: NaN in every format

    config = EngineConfig(model=folder, num_blocks=1600 // block_size, block_size=block_size)
    return Engine(config, allocate=full_of_nan)


def test_blocks_of_any_size_give_the_same_answers(folder: Path) -> None:
    lengths, answers = (1, 63, 64, 65, 200, 300), []
    for block_size, chunk_size in ((16, 512), (8, 50), (64, 512), (128, 90)):
        generator = Generator(engine_of(folder, block_size), chunk_size=chunk_size)
        first = generator.run([new_sequence(f"r{length}", prompt_of(length)) for length in lengths])
        again = new_sequence("again", [*prompt_of(300)[:260], 9])
        answers.append([*first, *generator.run([again])])
        assert again.num_cached == 260 // block_size * block_size
    assert all(answer == answers[0] for answer in answers)


def test_a_full_block_never_changes_and_others_are_not_touched(folder: Path) -> None:
    engine = engine_of(folder, 16)
    generator = Generator(engine)
    first = new_sequence("first", prompt_of(40))
    generator.run([first])
    shared = engine.kv.clone()
    branched = [new_sequence(f"r{end}", [*prompt_of(40)[:32], end], max_tokens=40) for end in (7, 8)]
    for sequence in branched:
        generator.admit(sequence)
        assert sequence.num_cached == 32
    own = {block for sequence in branched for block in sequence.block_table[2:]}
    assert len(own) == sum(len(sequence.block_table) - 2 for sequence in branched)
    while not all(sequence.finish_reason() for sequence in branched):
        generator._advance([sequence for sequence in branched if not sequence.finish_reason()])
    others = [block for block in range(engine.layout.num_blocks) if block not in own]
    assert torch.equal(engine.kv[others], shared[others])
    assert branched[0].token_ids[33:] != branched[1].token_ids[33:]
