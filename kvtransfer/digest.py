"""The digest of a block's bytes, which the receiver compares with the writer's.

    digest(block) = sum_i (x_i + 1) * m_i  mod 2^64,   m_i = splitmix64(i) | 1

over the block's unsigned 32-bit lanes x_i (one 4-byte number, two of 2 bytes or four of one). i is the lane's index in the
block of the whole model: parts one after the other, each as [layer, plane, slot, head, dim] with all its heads. An odd factor
is invertible modulo 2^64, so any single changed lane changes the sum. For several lanes a collision is as likely as a random
64-bit match (the multilinear hash of Carter and Wegman, 1979). The sum is linear: digests of workers with different heads
add up to the whole block's. It guards against corruption and mix-ups, not against chosen bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from common.pages import LANE_BYTES, KVLayout
from kvtransfer.plan import is_sharded, lane_indices
from kvtransfer.transport import AmongRanks, Transport

Factors = npt.NDArray[np.uint64]


def block_digests(pool: torch.Tensor, blocks: Sequence[int], layout: KVLayout | None = None) -> bytes:
    """Return one little-endian u64 a block of `pool` [num_blocks, ...], of any dtype, on any device.

    `layout`: which heads of the model the pool keeps; None: all of them.
    """
    if pool.is_cuda:
        from kvtransfer.cuda.mover import mover_of

        return mover_of(pool, layout).digests(blocks) if blocks else b""
    lanes = lane_view(pool)
    factors = multipliers(lanes.shape[1]) if layout is None else factors_of(layout)
    digests = np.empty(len(blocks), dtype="<u8")
    for index, block in enumerate(blocks):  # one at a time, so that temporaries stay in the cache
        digests[index] = lane_digest(lanes[block], factors)
    return digests.tobytes()


def lane_view(pool: torch.Tensor) -> npt.NDArray[np.uint32]:
    """View `pool`, in host memory, as [num_blocks, lanes] u32, without a copy."""
    return pool.view(pool.shape[0], -1).view(torch.int32).numpy().view(np.uint32)


def lane_digest(lanes: npt.NDArray[np.uint32], factors: Factors) -> np.uint64:
    """Return the digest of one block's lanes [n]."""
    products = (lanes.astype(np.uint64) + np.uint64(1)) * factors
    total: np.uint64 = np.add.reduce(products)
    return total


def factors_of(layout: KVLayout) -> Factors:
    """Return m_i for each lane of this layout's block; i is the lane's index in the whole model's block."""
    return _factors_at(layout) if is_sharded(layout) else multipliers(layout.block_bytes // LANE_BYTES)


@lru_cache(maxsize=8)
def multipliers(count: int) -> Factors:
    """Return m_i for i below `count`."""
    return _odd_splitmix64(np.arange(count, dtype=np.uint64))


@lru_cache(maxsize=8)
def _factors_at(layout: KVLayout) -> Factors:
    return _odd_splitmix64(lane_indices(layout).astype(np.uint64))


def _odd_splitmix64(indices: npt.NDArray[np.uint64]) -> Factors:
    """Hash each index with splitmix64 (Steele, Lea, Flood 2014) and make it odd."""
    with np.errstate(over="ignore"):
        z = (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


async def pool_digests(transport: Transport, pool: torch.Tensor, layout: KVLayout, blocks: Sequence[int]) -> bytes:
    """Digest blocks of a worker's pool, on all of its ranks. Raises TransferError."""
    if isinstance(transport, AmongRanks):
        return await transport.digests(blocks)
    return await asyncio.to_thread(block_digests, pool, blocks, layout)
