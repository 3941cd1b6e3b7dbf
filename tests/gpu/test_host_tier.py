"""Copies between a card's pool and pinned host memory, while the card computes: bytes and digests stay those of the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from common.pages import KVLayout, PagePart
from engine.cache.pages import pool_dtype, pool_shape
from kvtransfer.digest import block_digests
from worker.tier.host_blocks import HostBlocks
from worker.tier.host_memory import HostMemory
from worker.tier.host_store import HostStore, PrivateStore, Write
from worker.tier.region import Region
from worker.tier.shared_store import SharedStore

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


def filled(memory: HostMemory, blocks: Sequence[int]) -> tuple[bytes, Sequence[int]]:
    write = HostBlocks(memory.store).reserve(b"digest".ljust(16), {0: len(blocks)})
    assert write is not None
    memory.fill([write], [{0: tuple(blocks)}])
    return write.sums[0], write.slots[0]


@pytest.fixture(params=["private", "shared"])
def store(request: pytest.FixtureRequest) -> Iterator[HostStore]:
    if request.param == "private":
        yield PrivateStore(NUM_BLOCKS)
        return
    _, layout = new_pool("bfloat16")
    store = SharedStore(Region.join("test", NUM_BLOCKS, layout.block_bytes))
    yield store
    store.close()


def test_a_process_loads_what_another_one_stored() -> None:
    kv, layout = new_pool("bfloat16")
    stores, loads = (SharedStore(Region.join("test", NUM_BLOCKS, layout.block_bytes)) for _ in range(2))
    writes, reads = HostMemory(kv, layout, stores), HostMemory(kv, layout, loads)
    write = Write(b"digest".ljust(16), {0: 3})
    writes.fill([write], [{0: (4, 5, 6)}])
    blocks = HostBlocks(loads)
    blocks.catch_up()
    block = blocks.get(write.digest)
    assert block is not None
    assert reads.load(block.slots[0], [40, 41, 42]) == block.sums[0] == write.sums[0]
    assert reads.slot(block.slots[0][0]).is_pinned()
    lanes = kv.view(NUM_BLOCKS, -1).view(torch.uint8)
    assert torch.equal(lanes[[4, 5, 6]], lanes[[40, 41, 42]])
    for each in (stores, loads):
        each.close()
    assert not stores.region.path.exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_what_comes_back_is_what_was_stored(dtype: str, store: HostStore) -> None:
    kv, layout = new_pool(dtype)
    if dtype != "bfloat16" and isinstance(store, SharedStore):
        pytest.skip("its region is of the other size")
    memory = HostMemory(kv, layout, store)
    stored, fresh = list(range(5, 25)), list(range(40, 60))
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy / 64
    sums, slots = filled(memory, stored)
    assert sums == block_digests(kv, stored, layout)
    lanes = kv.view(NUM_BLOCKS, -1).view(torch.uint8)
    expected = lanes[stored].clone()
    lanes[stored] = 0
    assert memory.load(slots, fresh) == sums
    assert torch.equal(lanes[fresh], expected)
    assert memory.slot(slots[0]).is_pinned()


def test_a_flipped_bit_shows_in_the_digest() -> None:
    kv, layout = new_pool("bfloat16")
    memory = HostMemory(kv, layout, PrivateStore(NUM_BLOCKS))
    sums, (slot,) = filled(memory, [3])
    memory.slot(slot)[1000] ^= 1
    assert memory.load([slot], [9]) != sums
