"""Waves of prompts beside decoding, by an engine with graphs and without."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from engine.batch.layout import Packed
from engine.engine import Engine
from engine.passes import Finished, Sampled
from engine.sequence import Chunk, Sequence
from tests.unit.engine.families import hybrids
from tests.unit.engine.generate import Generator, new_sequence

# One checkpoint for each kind of state, by the family.
KINDS = ("qwen3_5", "granite4", "jamba, without experts", "lfm2", "kimi_linear")
WITH_STATES = {case.name: case for case in hybrids.CASES if case.name in KINDS}
# To all of its experts: where two are about as good, other rounding would choose another one.
_OF_ALL = {"num_experts_per_tok": WITH_STATES["granite4"].fields["num_local_experts"]}
WITH_STATES["granite4"] = replace(WITH_STATES["granite4"], fields=WITH_STATES["granite4"].fields | _OF_ALL)
WAVES = (1, 3, 2, 4)  # prompts that join at a time, while the ones before decode
STEPS_BETWEEN = 5


@dataclass(slots=True)
class Record:
    """What came of each pass."""

    logits: list[torch.Tensor] = field(default_factory=list)  # [R, V] float32, of those that sample
    results: list[list[Sampled | None]] = field(default_factory=list)
    graphs: set[tuple[int, int]] = field(default_factory=set)  # (decoding, prompts) of those that were replayed


def run_waves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, with_graphs: bool, like: Record | None = None
) -> Record:
    """Run all waves to their end. With `like`, sequences go on with its tokens: every pass has the same inputs as there."""
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


def run_both_ways(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Record, Record]:
    """Without graphs, and with them on the same inputs.

    Graphs of decoding must be replayed, and but over latents those with prompts alone and with decoding beside.
    """
    plain = run_waves(engine, monkeypatch, with_graphs=False)
    replayed = run_waves(engine, monkeypatch, with_graphs=True, like=plain)
    assert not plain.graphs
    assert any(decoding and not prompts for decoding, prompts in replayed.graphs), replayed.graphs
    if any(heads.forms is not None for heads in engine._runner.limits.attention):
        assert not any(prompts for _, prompts in replayed.graphs), replayed.graphs
        return plain, replayed
    assert any(decoding and prompts for decoding, prompts in replayed.graphs), replayed.graphs
    assert any(prompts and not decoding for decoding, prompts in replayed.graphs), replayed.graphs
    assert len(plain.logits) == len(replayed.logits)
    return plain, replayed
