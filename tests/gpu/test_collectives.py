"""Collectives among two processes, each a rank, that write to each other's inbox: on one card, or on the first two.

    python -m pytest -q tests/gpu/test_collectives.py

On one card the processes take turns by the driver's time slices: what is checked is that all arrives, never how fast.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.collectives.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TIMEOUT_S = 170


@pytest.mark.parametrize("apart", [False, True], ids=["one card", "two cards"])
def test_what_ranks_sum_and_gather_is_right_everywhere(apart: bool) -> None:
    if apart and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    first, second = run_ranks("tests.gpu.collective_rank", [0, int(apart)], timeout_s=TIMEOUT_S)
    assert second is None, "the second rank has ended by itself"
    assert first is not None, "the first rank failed, or took too long: see its output"
    assert {name: wrong for name, wrong in first.items() if wrong} == {}
