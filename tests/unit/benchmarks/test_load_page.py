"""The page of measured loads, from a run's file."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec

from benchmarks.load.cells import CELLS, TWO_CARDS
from benchmarks.load.figures import Row
from benchmarks.load.page import KNOWN, main


def row(load: str, first_ms: float) -> Row:
    return Row(
        load=load,
        device="bf16",
        system="baton",
        source="measured",
        where="a card",
        seconds=40.0,
        requests=800,
        ttft_ms=(first_ms, 2 * first_ms, 4 * first_ms),
        tpot_ms=(9.0, 12.0, 15.0),
        good=1.0,
        per_second=18.0,
    )


def test_every_known_load_is_one_that_can_be_run() -> None:
    names = {cell.name for cell in CELLS.values()}
    on_two_cards = {f"{CELLS[key].name}, {arm}" for key in TWO_CARDS for arm in ("both roles", "1P+1D")}
    assert KNOWN.keys() <= names | on_two_cards


def test_a_later_run_of_a_load_counts_beside_its_target_and_its_bars(tmp_path: Path) -> None:
    runs = [[row("chat 20/s", 684.0), row("another", 20.0)], [row("chat 20/s", 50.0)]]
    for number, rows in enumerate(runs):
        (tmp_path / f"{number}.json").write_bytes(msgspec.json.encode(rows))
    assert main([str(tmp_path / "0.json"), str(tmp_path / "1.json"), "--out", str(tmp_path)]) == 0

    results = {each["name"]: each for each in msgspec.json.decode((tmp_path / "load.json").read_bytes())}
    assert results["chat_20_ttft_p50"]["value"] == 50.0
    assert results["chat_20_ttft_p50"]["target"] == 65.0
    assert results["another_ttft_p99"]["value"] == 80.0
    page = ElementTree.parse(tmp_path / "load.svg")
    said = " ".join(each.text or "" for each in page.iter("{http://www.w3.org/2000/svg}text"))
    assert "Baton: 50 / 100 / 200" in said
    assert "vLLM 0.33: 69 / 203 / 545" in said
