"""Copies between a card's pool and pinned host memory, while the card computes: bytes and digests stay those of the pool."""

from __future__ import annotations

import pytest
import torch

from common.pages import KVLayout, PagePart
from engine.cache.pages import pool_dtype, pool_shape
from kvtransfer.digest import block_digests
from worker.tier.host_memory import HostMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda:0"
NUM_BLOCKS = 64


def new_pool(dtype: str) -> tuple[torch.Tensor, KVLayout]:
    part = PagePart(layers=32, planes=2, heads=8, dim=128, dtype=dtype)  # a block of an 8B model
    layout = KVLayout.of([part], num_blocks=NUM_BLOCKS, block_size=16)
    lanes = torch.randint(0, 256, (NUM_BLOCKS, layout.block_bytes), dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()  # contents are final, as in a pool whose passes are over
    return lanes.view(pool_dtype(layout)).view(pool_shape(layout)), layout


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_what_comes_back_is_what_was_stored(dtype: str) -> None:
    kv, layout = new_pool(dtype)
    memory = HostMemory(kv, layout, NUM_BLOCKS)
    stored, fresh = list(range(5, 25)), list(range(40, 60))
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy / 64
    sums = memory.store(stored, range(20))
    assert sums == block_digests(kv, stored, layout)
    lanes = kv.view(NUM_BLOCKS, -1).view(torch.uint8)
    expected = lanes[stored].clone()
    lanes[stored] = 0
    assert memory.load(range(20), fresh) == sums
    assert torch.equal(lanes[fresh], expected)
    assert memory.slot(0).is_pinned()


def test_a_flipped_bit_shows_in_the_digest() -> None:
    kv, layout = new_pool("bfloat16")
    memory = HostMemory(kv, layout, NUM_BLOCKS)
    sums = memory.store([3], [7])
    memory.slot(7)[1000] ^= 1
    assert memory.load([7], [9]) != sums
