"""Transports between two processes that share a GPU: the receiver's digests are the writer's, for every size."""

from __future__ import annotations

import pytest
import torch

from benchmarks.handoff.transfer import measure
from tests.needs import needs
from tests.unit.kernels import share_checks

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


@pytest.mark.parametrize("transport", ["cuda_ipc", "ucx"])
@pytest.mark.parametrize("widths", [(1, 2), (2, 1), (1, 4)])
async def test_a_share_that_was_pushed_is_there(widths: tuple[int, int], transport: str) -> None:
    if transport == "ucx":
        needs("ucxx")
    rows = await measure(transport, ["cuda:0", "cuda:0"], (2, 8), widths)
    assert [size for size, *_ in rows] == [2, 8]


@pytest.mark.parametrize("name", share_checks.IN_MESSAGES)
def test_shares_of_every_kind_go_through_messages(name: str) -> None:
    needs("ucxx")
    from tests.unit.kernels import message_checks

    message_checks.run(name, "cuda", large=True)
