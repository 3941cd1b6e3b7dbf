"""The digest of a block's bytes, computed by the writer from what it sends and by the receiver from what it holds.

    digest(block) = sum_i (x_i + 1) * m_i  mod 2^64,   m_i = splitmix64(i) | 1

over the block's unsigned 32-bit lanes x_i (one 4-byte number or two 2-byte ones), i being the lane's index in
[layer, 2, slot, head, dim] order of the unsharded model. An odd factor is invertible modulo 2^64, so any single changed
lane changes the sum; for several lanes the pseudo-random factors make a collision as likely as a random 64-bit match
(the multilinear hash of Carter and Wegman, 1979). The sum is linear: the digests of tensor-parallel shards add up to
the whole block's. It guards against corruption and mix-ups, not against somebody who can choose the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch


def block_digests(pool: torch.Tensor, blocks: Sequence[int]) -> bytes:
    """Return one little-endian u64 a block of `pool` [num_blocks, ...], any 2- or 4-byte dtype, on any device."""
    if pool.is_cuda:
        from kvtransfer.blocks import mover_of

        return mover_of(pool).digests(blocks) if blocks else b""
    lanes = lane_view(pool)
    factors = multipliers(lanes.shape[1])
    digests = np.empty(len(blocks), dtype="<u8")
    for index, block in enumerate(blocks):  # block by block: the temporaries stay in the cache
        digests[index] = lane_digest(lanes[block], factors)
    return digests.tobytes()


def lane_view(pool: torch.Tensor) -> npt.NDArray[np.uint32]:
    """View `pool`, in host memory, as [num_blocks, lanes] u32, without a copy."""
    return pool.view(pool.shape[0], -1).view(torch.int32).numpy().view(np.uint32)


def lane_digest(lanes: npt.NDArray[np.uint32], factors: npt.NDArray[np.uint64]) -> np.uint64:
    """Digest of one block's lanes [n]."""
    products = (lanes.astype(np.uint64) + np.uint64(1)) * factors
    total: np.uint64 = np.add.reduce(products)
    return total


@lru_cache(maxsize=8)
def multipliers(count: int) -> npt.NDArray[np.uint64]:
    """m_i for i below `count`: splitmix64 (Steele, Lea, Flood 2014) of the index, made odd."""
    with np.errstate(over="ignore"):
        z = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)
