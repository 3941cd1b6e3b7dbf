"""Transports between two processes that share a GPU: the receiver's digests are the writer's, for every size."""

from __future__ import annotations

import pytest
import torch

from benchmarks.handoff.transfer import measure
from tests.needs import needs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("transport", ["cuda_ipc", "ucx"])
async def test_what_was_pushed_is_there(transport: str) -> None:
    if transport == "ucx":
        needs("ucxx")
    rows = await measure(transport, ["cuda:0", "cuda:0"], (2, 32))
    assert [size for size, *_ in rows] == [2, 32]


@pytest.mark.parametrize("widths", [(1, 2), (2, 1), (1, 4)])
async def test_a_share_that_was_pushed_is_there(widths: tuple[int, int]) -> None:
    rows = await measure("cuda_ipc", ["cuda:0", "cuda:0"], (2, 8), widths)
    assert [size for size, *_ in rows] == [2, 8]
