"""Transports are chosen by name."""

from __future__ import annotations

import pytest
import torch

from common.messages import KVLayout
from kvtransfer.select import open_transport
from kvtransfer.transport import TransferError


def test_an_unknown_transport_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="shm, cuda_ipc, ucx, local"):
        open_transport("pigeon")


async def test_a_local_pool_is_zeroed_memory_that_no_peer_can_reach() -> None:
    transport = open_transport("local")
    pool = transport.allocate((2, 3), torch.float32, "cpu")
    assert torch.equal(pool, torch.zeros(2, 3))
    layout = KVLayout(num_blocks=2, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    region = await transport.open(pool, layout, incarnation=7)
    with pytest.raises(TransferError, match="another one"):
        await transport.connect(region)
