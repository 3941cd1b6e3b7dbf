"""Loads of `benchmarks.load` sent to a server that it starts itself, as on a lent card."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks.load.figures import FILE, read_rows
from tests.e2e.stack import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
async def test_a_server_of_its_own_is_started_loaded_and_stopped_and_its_figures_are_kept(tmp_path: Path) -> None:
    load = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.load", "--serve", "bf16", "--cells", "chat-8", "--seconds", "0.5"),
        *("--warm-seconds", "0", "--card", "cpu", "--checkpoint", str(ROOT / "demo"), "--out", str(tmp_path)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(load.communicate(), 2 * PATIENCE_S)
    assert load.returncode == 0, printed.decode()
    (row,) = read_rows(tmp_path / FILE)
    assert (row.load, row.source, row.where, row.refused) == ("chat 8/s", "measured", "CPU", 0)
    assert str(row) in printed.decode()
    assert 0 < row.ttft_ms[0] <= row.ttft_ms[2]
    assert "decode-0.log" in (tmp_path / "server-bf16.log").read_text()
