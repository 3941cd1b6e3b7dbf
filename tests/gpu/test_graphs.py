"""Passes replayed from CUDA graphs answer as passes launched kernel by kernel do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence
from tests.unit.engine.generate import Generator, new_sequence

ROOT = Path(__file__).resolve().parents[2]
WAVES = (1, 3, 2, 4)  # prompts that join at a time, while the ones before decode
STEPS_BETWEEN = 5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _answers(engine: Engine, *, with_graphs: bool) -> tuple[list[list[int]], set[tuple[int, int]]]:
    """The tokens of each sequence, and (decoding, prompts) of the graphs that were replayed."""
    runner = engine._runner
    sizes, used = runner._sizes, set()
    choose = runner._graph_size

    def spy(chunks):  # type: ignore[no-untyped-def]
        size = choose(chunks)
        if size is not None:
            used.add((size.decoding, size.prompts))
        return size

    runner._graph_size = spy  # type: ignore[method-assign]
    runner._sizes = sizes if with_graphs else []
    try:
        generator, running, everybody = Generator(engine, chunk_size=100), [], []
        for wave in WAVES:
            for _ in range(wave):
                number = len(everybody)
                text = [(31 * number + 7 * at + at * at) % 500 + 20 for at in range(30 + 45 * number)]
                sequence = new_sequence(f"s{number}", text, max_tokens=40)
                generator.admit(sequence)
                everybody.append(sequence)
                running.append(sequence)
            for _ in range(STEPS_BETWEEN):
                _step(generator, running)
        while any(not sequence.finish_reason() for sequence in everybody):
            _step(generator, running)
    finally:
        runner._sizes = sizes
        runner._graph_size = choose  # type: ignore[method-assign]
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in everybody], used


def _step(generator: Generator, running: list[Sequence]) -> None:
    running[:] = [sequence for sequence in running if not sequence.finish_reason()]
    if running:
        generator._advance(running)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_answer_alike(dtype: str) -> None:
    model = ROOT / "models/demo"
    engine = Engine(EngineConfig(model=model, device="cuda", dtype=dtype, num_blocks=600, max_sequences=32))
    plain, none = _answers(engine, with_graphs=False)
    replayed, used = _answers(engine, with_graphs=True)
    assert not none
    assert any(decoding and prompts for decoding, prompts in used), used
    assert any(prompts and not decoding for decoding, prompts in used), used
    wrong = sum(a != b for a, b in zip(plain, replayed, strict=True))
    assert wrong <= len(plain) // 5, f"{wrong} of {len(plain)} differ"  # products of other sizes round otherwise
