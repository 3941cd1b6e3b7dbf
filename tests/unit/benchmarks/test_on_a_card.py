# mypy: allow-untyped-calls
"""The steps that a lent GPU runs, on one that isn't there: no second of it is lost to a program that fails."""

# ruff: noqa: E402 (these imports fail where triton is missing)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.needs import needs

needs("triton")

from benchmarks.engine.ceilings import measure_ceilings
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import quantised
from benchmarks.kernels.quantised import INTERPRETED
from benchmarks.on_a_gpu import OUT, STEPS, Step
from tests.unit.benchmarks.steps import run
from tests.unit.benchmarks.tiny import tiny
from tests.unit.engine.families.case import Case
from tests.unit.kernels.dry import Launches, dry

ENGINES = [step for step in STEPS if step.command[0] == "benchmarks.engine"]
KERNELS = [step for step in STEPS if step.command[0] == "benchmarks.kernels"]
QUICK = ("llama-8b-fp8-kv-fp8", "kernels")
SIZES = {"HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64, "FEATURES": 256, "HIDDEN": 256, "CHOSEN": 16}
SHAPES = {  # of each function that makes cases: its own arguments here
    "_decode_case": (2, 48),
    "_latent_case": (2, 48),
    "_sparse_cases": (2, 48),
    "_selection_case": (128, 128),
    "_prefill_case": (128, 128),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return Case(name="llama", config="LlamaConfig", fields=small).build(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Everything is small, and a run takes no time."""
    for name, size in SIZES.items():
        monkeypatch.setattr(kernels, name, size)
    for name, shape in SHAPES.items():
        make = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda device, _, __, *rest, make=make, shape=shape: make(device, *shape, *rest)
        )
    monkeypatch.setattr(kernels, "COMPARED_ROWS", 6)
    for module in (kernels, quantised):
        monkeypatch.setattr(module, "REAL", replace(INTERPRETED, inputs=512, hidden=256, size=128))
    for module in ("kernels", "engine"):
        monkeypatch.setattr(
            f"benchmarks.{module}.__main__.measure_ceilings", lambda *given, quick: measure_ceilings(*given, quick=True)
        )
    monkeypatch.setattr("triton.testing.do_bench", lambda run, **_: run() is None or 0.1)
    found = Launches(token=5)
    with dry(found):
        yield found


def check(step: Step, launches: Launches, out: Path, *more: str) -> None:
    module, *arguments = (word.replace(OUT, str(out)) for word in step.command)
    assert run(module, [*arguments, *more]) == 0
    assert launches.count > 50
    assert not launches.wrong


def _parameters(steps: list[Step]) -> list[object]:
    return [pytest.param(step, id=step.name, marks=() if step.name in QUICK else pytest.mark.long) for step in steps]


@pytest.mark.parametrize("step", _parameters(KERNELS))
def test_kernels_are_measured(step: Step, launches: Launches, tmp_path: Path) -> None:
    check(step, launches, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("step", _parameters(ENGINES))
def test_an_engine_is_measured(
    step: Step, llama: Path, launches: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the start of processes: they would need a card of their own."""
    more = ["--quick", "--cells", "^(?!start|accuracy|kernels)", "--checkpoints", str(tmp_path / "checkpoints")]
    if "--shape" in step.command:
        tiny(monkeypatch, step.command[step.command.index("--shape") + 1])
    else:
        more += ["--model", str(llama)]
    check(step, launches, tmp_path / "out", *more)
    (page,) = (tmp_path / "out").glob("*.md")
    assert "decode_b8_ctx64" in page.read_text()
