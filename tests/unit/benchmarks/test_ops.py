"""The comparison of ops' implementations on a CPU: ours in Triton's interpreter, plain torch, and libraries that are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.ops import command, libraries
from benchmarks.kernels.ops.command import OPS, Chosen, Row, cell_of, fill, rows_of, side_by_side
from benchmarks.kernels.ops.comparing import OURS, PLAIN, Comparison, Implementation, Limits, compare
from benchmarks.results_format import ResultsPage, read_results

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
LIMITS = Limits(bytes_per_s=1e9, flops_per_s=1e9, fp8_flops_per_s=2e9)


@pytest.fixture(autouse=True)
def _without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_found", lambda _: "not installed")


@pytest.mark.parametrize("op", OPS)
def test_each_op_is_near_float64_and_says_what_is_missing(op: str) -> None:
    rows = list(rows_of(op, CPU, Chosen(is_tiny=True), LIMITS, float("inf")))
    assert {row.shape for row in rows if row.implementation == OURS} == {row.shape for row in rows}
    for row in rows:
        if row.implementation.startswith((OURS, PLAIN)):
            assert row.us is not None, row
            rounds = op in ("linear-fp8", "experts-fp8")  # many rows of ours are 8 bits
            assert 0 <= row.error < (0.08 if rounds else 2e-3), row
        elif row.us is None:
            assert row.remark.startswith("failed: ") or row.remark.endswith(": not installed"), row


def test_no_op_begins_after_its_time() -> None:
    rows = list(rows_of("delta-rule", CPU, Chosen(is_tiny=True, only="plain"), LIMITS, 0.0))
    assert {(row.implementation, row.us, row.remark) for row in rows} == {(PLAIN, None, "left out: no time")}


def test_a_failure_is_a_row() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no kernel image | for this card\nmore")

    comparison = Comparison(
        op="sum",
        shape="one",
        implementations={OURS: Implementation(prepare=lambda: fail)},
        exact=lambda: torch.ones(1, dtype=torch.float64),
        compared=lambda out: out,
        num_bytes=1e3,
        flops=1.0,
    )
    row = compare(comparison, OURS, LIMITS, CPU, torch.float32)
    assert (row.us, row.remark) == (None, "failed: RuntimeError: no kernel image / for this card")
    assert cell_of(row) == row.remark


def test_a_page_has_each_row_and_the_best_library_as_reference(tmp_path: Path) -> None:
    rows = [
        Row(op="sum", shape="one", implementation=OURS, floor_us=1.0, us=2.0, error=1e-3),
        Row(op="sum", shape="one", implementation=PLAIN, floor_us=1.0, us=1.5, error=1e-3, is_captured=False),
        Row(op="sum", shape="one", implementation="a", floor_us=1.0, us=4.0, error=2e-3),
        Row(op="sum", shape="one", implementation="b", floor_us=1.0, remark="b: not installed"),
    ]
    page = ResultsPage(tmp_path, "kernels-ops", title="Ops", facts={})
    fill(page, rows, "")
    found = {result.name: result for result in read_results(tmp_path / "kernels-ops.json")}
    assert found["sum one: ours"].reference == 4.0
    assert found["sum one: a"].value == 4.0
    text = (tmp_path / "kernels-ops.md").read_text()
    assert "| one | 1.0 us | 2.0 us (50%, 1.00e-3) | 1.5 us (67%, eager, 1.00e-3) | 4.0 us (25%, 2.00e-3) |" in text
    assert side_by_side(rows).strip() in text
    assert "sum, b: b: not installed (one)" in text


@pytest.mark.long
def test_each_op_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = {op: OPS[op] for op in ("mla-decode", "delta-rule")}
    monkeypatch.setattr(command, "OPS", few)
    given = ["--op", "all", "--tiny", "--device", "cpu", "--only", PLAIN, "--shapes", "b2", "--out", str(tmp_path)]
    assert command.main(given) == 0
    names = {result.name.partition(" ")[0] for result in read_results(tmp_path / "kernels-ops.json")}
    assert names == few.keys()


@pytest.mark.long
def test_all_in_the_interpreter(tmp_path: Path) -> None:
    """One implementation and shape of each op."""
    words = [sys.executable, "-m", "benchmarks.kernels", "--op", "all", "--tiny", "--device", "cpu"]
    words += ["--only", "ours|FlashInfer", "--shapes", "b1|m2$|t3|b2", "--time-limit", "700", "--out", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(words, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=800)
    names = {result.name.partition(" ")[0] for result in read_results(tmp_path / "kernels-ops.json")}
    assert names == set(OPS) - {"attention-prefill"}
