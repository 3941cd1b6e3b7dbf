"""Passes replayed from CUDA graphs answer as passes launched kernel by kernel do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.passes import Finished, Sampled
from engine.sequence import Chunk, Sequence
from engine.step.layout import Packed
from tests.unit.engine.families import hybrids
from tests.unit.engine.generate import Generator, new_sequence

ROOT = Path(__file__).resolve().parents[2]
WAVES = (1, 3, 2, 4)  # prompts that join at a time, while the ones before decode
STEPS_BETWEEN = 5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@dataclass(slots=True)
class Record:
    """What came of each pass."""

    logits: list[torch.Tensor] = field(default_factory=list)  # [R, V] float32, of those that sample
    results: list[list[Sampled | None]] = field(default_factory=list)
    graphs: set[tuple[int, int]] = field(default_factory=set)  # (decoding, prompts) of those that were replayed


def _run(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, with_graphs: bool, like: Record | None = None) -> Record:
    """Waves of prompts beside decoding. With `like`, sequences go on with its tokens: every pass has the same inputs as there."""
    record, runner = Record(), engine._runner
    execute = runner.execute

    def spy(packed: Packed) -> torch.Tensor | None:
        if (graph := packed.size.graph) is not None:
            record.graphs.add((graph.decoding, graph.prompts))
        logits = execute(packed)
        record.logits.append(torch.empty(0) if logits is None else logits.float().cpu())
        return logits

    def launch(chunks: list[Chunk]) -> Finished:
        record.results.append(engine.launch(chunks).wait())
        return Finished((like or record).results[len(record.results) - 1])

    with monkeypatch.context() as patched:
        patched.setattr(runner, "execute", spy)
        if not with_graphs:
            patched.setattr(runner.graphs, "sizes", [])
        generator, everybody = Generator(engine, chunk_size=100), list[Sequence]()
        patched.setattr(generator, "launch", launch)
        for wave in WAVES:
            for _ in range(wave):
                number = len(everybody)
                text = [(31 * number + 7 * at + at * at) % 480 + 20 for at in range(30 + 45 * number)]
                everybody.append(new_sequence(f"s{number}", text, max_tokens=40))
                generator.admit(everybody[-1])
            for _ in range(STEPS_BETWEEN):
                _step(generator, everybody)
        while any(not sequence.finish_reason() for sequence in everybody):
            _step(generator, everybody)
    return record


def _step(generator: Generator, everybody: list[Sequence]) -> None:
    if running := [sequence for sequence in everybody if not sequence.finish_reason()]:
        generator._advance(running)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_graphs_answer_alike(dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(ROOT / "demo", dtype, tolerance, monkeypatch)


def test_so_they_do_with_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(hybrids.QWEN_3_5.build(tmp_path), "float16", 0.02, monkeypatch)


def test_states_on_a_gpu_are_those_on_a_cpu(tmp_path: Path) -> None:
    """In float32: prompts whole and in chunks beside decoding, decoding from graphs."""
    model = hybrids.QWEN_3_5.build(tmp_path)
    answers = []
    for device in ("cpu", "cuda"):
        engine = Engine(EngineConfig(model=model, device=device, dtype="float32", num_blocks=300, max_sequences=8))
        prompts = [[(31 * length + 7 * at + at * at) % 500 + 5 for at in range(length)] for length in (1, 16, 70, 200)]
        sequences = [new_sequence(f"r{index}", prompt, max_tokens=30) for index, prompt in enumerate(prompts)]
        answers.append(
            [Generator(engine, chunk_size=size).run(some) for size, some in ((512, sequences[:2]), (90, sequences[2:]))]
        )
    assert answers[0] == answers[1]


def _check(model: Path, dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig(model=model, device="cuda", dtype=dtype, num_blocks=600, max_sequences=32))
    plain = _run(engine, monkeypatch, with_graphs=False)
    replayed = _run(engine, monkeypatch, with_graphs=True, like=plain)
    again = _run(engine, monkeypatch, with_graphs=True, like=plain)
    assert not plain.graphs
    assert any(decoding and prompts for decoding, prompts in replayed.graphs), replayed.graphs
    assert any(prompts and not decoding for decoding, prompts in replayed.graphs), replayed.graphs
    assert len(plain.logits) == len(replayed.logits)
    apart = [
        float((a - b).abs().max() / a.abs().max())
        for a, b in zip(plain.logits, replayed.logits, strict=True)
        if a.numel()
    ]
    assert max(apart) < tolerance, sorted(apart)[-5:]  # products of other sizes, and other tiles, round otherwise
    assert all(torch.equal(a, b) for a, b in zip(replayed.logits, again.logits, strict=True)), "a race"
