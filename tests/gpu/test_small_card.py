"""A 24 GB card's memory on a larger card: an 8B model in bfloat16 loads, takes its pool, and runs its largest pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RTX_4090_BYTES = 25_250_000_000
CELLS = ("decode_b8_ctx1088", "ttft_p8192")  # whose prompts fill a pass
CAPPED = """
import runpy, sys, torch
cap, seen = int(sys.argv.pop(1)), torch.cuda.mem_get_info
def mem_get_info(device=None):
    free, total = seen(device)
    return max(cap - (total - free), 0), cap
torch.cuda.set_per_process_memory_fraction(cap / seen()[1])
torch.cuda.mem_get_info = mem_get_info
sys.argv[0] = "benchmarks.engine"
runpy.run_module("benchmarks.engine", run_name="__main__", alter_sys=True)
"""


def test_a_card_of_24_gb_serves_an_8b_model(tmp_path: Path) -> None:
    """The allocator refuses what lies beyond; the driver's own memory counts as used."""
    cells = f"^({'|'.join(CELLS)})$"
    ran = subprocess.run(
        [sys.executable, "-c", CAPPED, str(RTX_4090_BYTES), "--out", str(tmp_path), "--cells", cells],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    (page,) = tmp_path.glob("engine*.json")
    assert set(CELLS) <= {result["name"] for result in json.loads(page.read_text())}
