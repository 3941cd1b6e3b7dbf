"""Whole blocks of the pool: gathered into one contiguous run for a transfer, scattered back, and their digests.

N blocks of the pool, n chosen ones, E elements a block (all layers, K and V).
"""

from __future__ import annotations

import torch

from engine.kernels.backend import use_triton


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return blocks `ids` [n] int64 of `pool` [N, ...] as one contiguous [n, E]."""
    if use_triton(pool):
        from engine.kernels.triton_blocks import gather_blocks as kernel

        return kernel(pool, ids)
    return reference_gather(pool, ids)


def scatter_blocks(staging: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor) -> None:
    """Write `staging` [n, E] into blocks `ids` [n] int64 of `pool` [N, ...]. `ids` must be distinct."""
    if use_triton(pool):
        from engine.kernels.triton_blocks import scatter_blocks as kernel

        kernel(staging, pool, ids)
    else:
        reference_scatter(staging, pool, ids)


def block_digests(staging: torch.Tensor) -> torch.Tensor:
    """Return the digests [n] int64 (the bits of a u64) of `staging` [n, E]; the definition is in `kvtransfer/digest.py`."""
    if use_triton(staging):
        from engine.kernels.triton_blocks import block_digests as kernel

        return kernel(staging)
    return reference_digests(staging)


def reference_gather(pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The twin of `gather_blocks`."""
    return pool.reshape(pool.shape[0], -1)[ids]


def reference_scatter(staging: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor) -> None:
    """The twin of `scatter_blocks`."""
    pool.view(pool.shape[0], -1)[ids] = staging


def reference_digests(staging: torch.Tensor) -> torch.Tensor:
    """The twin of `block_digests`: int64 products and sums wrap around modulo 2^64, as wanted."""
    if staging.element_size() == 2:
        lanes = staging.view(torch.int16).long() & 0xFFFF
    else:
        lanes = staging.view(torch.int32).long() & 0xFFFFFFFF
    return ((lanes + 1) * multipliers(staging.shape[1], staging.device)).sum(dim=1)


def multipliers(count: int, device: torch.device) -> torch.Tensor:
    """splitmix64(i) | 1 for i below `count`, as int64 bits; the shifts are logical."""
    z = (torch.arange(count, dtype=torch.int64, device=device) + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
