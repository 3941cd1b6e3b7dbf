"""Benchmarks that hand out blocks themselves take models with states, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cpu import __main__ as cpu
from benchmarks.engine import startup
from tests.unit.engine.families import hybrids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrids.QWEN_3_5.build(tmp_path_factory.mktemp("hybrid"))


def test_the_cells_of_a_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BATCHES", (1, 3)), ("STEPS", 2), ("CONTEXT", 40), ("PROMPT", 100)):
        monkeypatch.setattr(cpu, name, value)
    found = cpu.measured(model, "float32", 1)
    assert {"decode, batch 1", "decode, batch 3", "prompt of 100"} <= set(found)


def test_a_start_up_to_the_first_token(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    startup._main({"model": str(model), "cache": {"num_blocks": 200}, "num_threads": 1}, 50)
    assert list(json.loads(capsys.readouterr().out)) == ["imported", "ready", "first_token"]
