"""Captured chains without a card: kernels in Triton's interpreter, and a graph that launches again what it captured.

echo '["dflash+window"]' | TRITON_INTERPRET=1 python -m tests.unit.engine.captured_chains
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

from engine.batch.layout import GraphSize
from engine.config import CacheConfig, EngineConfig
from engine.drafts import guesses
from engine.engine import Engine
from tests.models import build_tiny_model
from tests.unit.engine.drafters import drafter
from tests.unit.engine.drafts import compare_drafts
from tests.unit.engine.generate import Generator, new_sequence

PROMPTS = [[3 + (number * 37 + at * 11) % 400 for at in range(length)] for number, length in enumerate((39, 5, 27))]


@dataclass(slots=True)
class Again:
    """A graph that launches what it captured, and counts how often."""

    launch: Callable[[], object]
    replays: ClassVar[int] = 0

    def replay(self) -> None:
        Again.replays += 1
        self.launch()


def check(name: str, folder: Path) -> None:
    """Assert that a drafter's captured chains draft what its arithmetic does."""
    model = build_tiny_model(folder / "target", "llama", num_hidden_layers=3)
    settings, reference = drafter(name, model, folder / "draft")
    engine = Engine(EngineConfig(model=model, cache=CacheConfig(num_blocks=64), **settings))
    assert engine._drafting is not None
    assert reference is not None
    sizes = [GraphSize(count) for count in (1, 2, 4)]
    with (
        patch.object(engine._runner.graphs.captures, "capture", Again),
        patch.object(guesses, "replay_ms", lambda graph: 1.0),
    ):
        assert set(engine._drafting.capture(engine._runner, sizes)) == {1, 2, 4}
    generator = Generator(engine, chunk_size=16)
    sequences = [new_sequence(str(number), prompt, max_tokens=5) for number, prompt in enumerate(PROMPTS)]
    generator.run(sequences)
    assert compare_drafts(generator, sequences, reference) > 10
    assert Again.replays > 4


if __name__ == "__main__":
    for name in json.load(sys.stdin):
        with tempfile.TemporaryDirectory() as folder:
            check(name, Path(folder))
