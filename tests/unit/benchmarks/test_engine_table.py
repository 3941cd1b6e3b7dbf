"""The whole table in its small form on the CPU: its structure, not its times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine import drafted
from benchmarks.engine.__main__ import STARTS, main, position_bytes
from benchmarks.engine.cells import FULL, QUICK, Decode
from benchmarks.engine.targets import TARGETS
from benchmarks.results_format import read_results
from common.pages import KVLayout, PagePart
from engine.cache.pages import layout_of
from engine.config import CacheConfig

SMALL = ["--shape", "demo", "--device", "cpu", "--quick", "--commit", "abc"]
# Cells whose figure is one time less another, and with so few runs below 0 by chance.
DIFFERENCES = {cell.name for cell in drafted.QUICK if isinstance(cell, drafted.DraftCost)}


@pytest.mark.long
def test_the_small_table_measures_every_cell(tmp_path: Path) -> None:
    assert main([*SMALL, "--out", str(tmp_path), "--checkpoints", str(tmp_path)]) == 0
    results = {result.name: result for result in read_results(tmp_path / "engine.json")}
    assert {*STARTS, *(cell.name for cell in QUICK)} <= results.keys()
    assert all(result.value > 0 for name, result in results.items() if name not in DIFFERENCES)
    for cell in QUICK:
        assert (results[cell.name].floor or 0) > 0
    text = (tmp_path / "engine.md").read_text()
    for fact in (
        "- date: ",
        "- commit: abc",
        "- device: CPU",
        "- versions: torch",
        "python -m benchmarks.engine --shape demo",
    ):
        assert fact in text


def test_a_pattern_chooses_cells_and_a_spent_limit_leaves_them_out(tmp_path: Path) -> None:
    assert main([*SMALL, "--out", str(tmp_path), "--cells", "ttft|prefill", "--limit-s", "0"]) == 1
    names = {result.name for result in read_results(tmp_path / "engine.json")}
    assert names == {"copy_bandwidth", "read_bandwidth", "matmul_rate", "upload_bandwidth"}
    text = (tmp_path / "engine.md").read_text()
    assert "ttft_p48: left out" in text
    assert "decode_b1" not in text


def test_a_profile_is_written_beside_the_results(tmp_path: Path) -> None:
    assert main([*SMALL, "--out", str(tmp_path), "--profile", "decode_b8_ctx64"]) == 0
    text = (tmp_path / "profile_decode_b8_ctx64.txt").read_text()
    assert text.startswith("profile of decode_b8_ctx64: 8 passes")


@pytest.mark.long
def test_drafts_are_timed_beside_steps_without(tmp_path: Path) -> None:
    assert main([*SMALL, "--out", str(tmp_path), "--checkpoints", str(tmp_path), "--cells", "verify|draft"]) == 0
    results = {result.name: result for result in read_results(tmp_path / "engine.json")}
    assert all(results[cell.name].value > 0 for cell in drafted.QUICK if cell.name not in DIFFERENCES)
    assert results.keys() >= DIFFERENCES
    over = results["drafted_b2_a70_over_none"]
    assert over.value == pytest.approx(results["drafted_b2_a70"].value / results["drafted_b2_a70_without"].value)


def test_every_target_has_its_cell() -> None:
    assert TARGETS["llama-3.1-8b"].keys() <= {*STARTS, *(cell.name for cell in FULL)}


def test_measured_steps_lie_around_the_stated_context() -> None:
    for cell in FULL:
        if isinstance(cell, Decode):
            assert cell.steps >= 50
            assert cell.context - cell.warm_up - cell.steps // 2 > 0


def test_a_context_too_short_for_its_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Decode(1, 20).first_context()


def test_layers_with_a_window_count_for_floors_wherever_their_blocks_are() -> None:
    part = PagePart(layers=8, planes=2, heads=8, dim=256, dtype="bfloat16")
    plain = KVLayout.of([part], num_blocks=100, block_size=16)
    windowed = PagePart(layers=40, planes=2, heads=8, dim=256, dtype="bfloat16", window=1024)
    layout = layout_of([part, windowed], CacheConfig(num_blocks=100), 0)
    assert position_bytes(plain) == 8 * 8192
    assert position_bytes(layout) == 48 * 8192


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "stem", "told"),
    [
        (["--stages", "a,b"], "engine-pp2", "- model: demo, 2 stages\n"),
        (["--stages", "a,b,c,d", "--width", "2"], "engine-pp2-tp2", "- model: demo, 2 stages of 2 ranks\n"),
    ],
)
def test_stages_are_measured_as_one_engine(asked: list[str], stem: str, told: str, tmp_path: Path) -> None:
    cells = ["--cells", "decode_b8_ctx64$|offline"]
    assert main([*SMALL, *asked, *cells, "--out", str(tmp_path), "--checkpoints", str(tmp_path)]) == 0
    results = {result.name: result.value for result in read_results(tmp_path / f"{stem}.json")}
    assert results["decode_b8_ctx64"] > 0 < results["offline_48_8"]
    assert told in (tmp_path / f"{stem}.md").read_text()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--ranks", "a,b", "--stages", "a,b"], "--ranks beside --stages: one of both"),
        (["--stages", "a,b,c", "--width", "2"], "--width 2: a number that divides those of --stages"),
        (["--ranks", "a,b", "--width", "2"], "--width 2: a number that divides those of --stages"),
    ],
)
def test_ranks_that_stages_do_not_have_are_refused(
    asked: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, *asked, "--out", str(tmp_path)])
    assert told in capsys.readouterr().err
