"""Workers whose stages are on several nodes, with a memory each, answer as one process does, and end with any of them."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.wide import check

STAGES, RANKS = True, False


async def test_stages_on_two_nodes_hand_over_to_one_process(tmp_path: Path) -> None:
    await check(tmp_path, prefill=2, decode=1, are_stages=(STAGES, RANKS), nodes={"prefill-0": 2}, transport="ucx")
