"""A trial of Hopper's own prefill kernel: its language, Gluon, is experimental, so small cases are run first."""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

from engine.kernels.attention.plan import Scores
from engine.kernels.attention.reference import attend_one
from engine.kernels.attention.split import LARGE_TILE, deal_out_tiles
from engine.kernels.device import describe
from engine.kernels.launch import is_compiling_ahead

log = logging.getLogger("baton.engine")

TRIALS = ((300, 0), (40, 1300))  # queries, positions before them: three tiles, and parts of one
BLOCK_SIZE = 16  # positions of a block in a trial's pool
MAX_RELATIVE_ERROR = 1e-2  # rounding to bfloat16 alone causes 4e-3


def tiles_at_once(device: torch.device, num_heads: int) -> int:
    """Tiles computed concurrently: each has a program for each head, one a processor."""
    return describe(device).processors // num_heads


def hopper_works(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Test `triton_prefill_hopper` on this shape; assume success where kernels are only compiled.

    Otherwise the reason is logged, and `triton_prefill` takes its place.
    """
    if not describe(device).is_hopper or dtype.itemsize != 2 or head_dim not in (64, 128):
        return False
    return is_compiling_ahead() or _was_right(device, dtype, num_heads, num_kv_heads, head_dim)


@functools.cache
def _was_right(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    reason = ""
    for queries, before in TRIALS:
        reason = reason or _try(device, dtype, num_heads, num_kv_heads, head_dim, queries, before)
    if reason:
        log.warning("engine.hopper_attention_unused", extra={"reason": reason})
    return not reason


def _try(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    queries: int,
    before: int,
) -> str:
    """Return the error in the result for `queries`, alone or after `before` positions in a pool; "" if there is none."""
    random = torch.Generator(device).manual_seed(0)
    context, scale, at_once = queries + before, head_dim**-0.5, tiles_at_once(device, num_heads)
    counts = -(-context // BLOCK_SIZE)
    q = torch.randn(queries, num_heads, head_dim, device=device, dtype=dtype, generator=random)
    pool = torch.randn(counts, 2, BLOCK_SIZE, num_kv_heads, head_dim, device=device, dtype=dtype, generator=random)
    table = torch.arange(counts, device=device, dtype=torch.int32)
    table = table.flip(0) if before else table
    new, all_ = np.array([queries]), np.array([context])
    tiles = deal_out_tiles(new, all_, np.zeros(1, dtype=np.int64), rows=LARGE_TILE, at_once=at_once)
    out = torch.empty_like(q)
    try:
        from engine.kernels.attention import triton_prefill_hopper

        keys, values = pool.transpose(0, 1).flatten(3)
        triton_prefill_hopper.prefill(
            q,
            keys if before else keys.flatten(0, 1),
            values if before else values.flatten(0, 1),
            torch.from_numpy(tiles).to(device),
            out,
            num_kv_heads=num_kv_heads,
            scale=scale,
            at_once=at_once,
            blocks=torch.stack((table, torch.full_like(table, BLOCK_SIZE)), dim=1) if before else None,
        )
        expected = attend_one(q, pool, table, context, Scores(scale=scale))
        error = float((out.float() - expected.float()).norm() / expected.float().norm())
    except Exception as problem:  # an experimental compiler may raise anything
        return f"{type(problem).__name__}: {problem}"[:200]
    return "" if error < MAX_RELATIVE_ERROR else f"relative error {error:.2g}"
