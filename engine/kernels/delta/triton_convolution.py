"""Triton version of `convolution`. T tokens, C channels, K taps, I tiles.

Decoding sequences read and shift their inputs in one program. Prompts are convolved tile by tile, all at once, and keep their
inputs in a second kernel, because a tile may end in the block that its prompt begins with.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.delta.plan import TILE_ROWS, DeltaHeads, StateBatch
from engine.kernels.launch import Kernel

CHANNELS_OF_A_STEP = 256
CHANNELS_OF_A_TILE = 64


def convolve(
    x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, batch: StateBatch, heads: DeltaHeads
) -> torch.Tensor:
    out = torch.empty((x.shape[0], heads.channels), dtype=x.dtype, device=x.device)
    columns = (
        heads.channels, heads.keys_size, heads.key_dim, heads.ratio * heads.value_dim,
        heads.q.first, heads.q.step, heads.k.first, heads.k.step, heads.v.first, heads.v.step,
    )  # fmt: skip
    fixed = (x.stride(0), kept.stride(0), kept.stride(1), heads.taps, *columns)
    variant = (x.dtype, kept.data_ptr() % 16, fixed)
    if len(batch.moves):
        _STEP.launch(
            (len(batch.moves), triton.cdiv(heads.channels, CHANNELS_OF_A_STEP)), variant,
            x, weight, kept, batch.moves, out, *fixed, CHANNELS_OF_A_STEP,
        )  # fmt: skip
    if len(batch.runs):
        blocks = triton.cdiv(heads.channels, CHANNELS_OF_A_TILE)
        _TILES.launch(
            (len(batch.tiles), blocks),
            variant,
            x,
            weight,
            kept,
            batch.tiles,
            out,
            *fixed,
            TILE_ROWS,
            CHANNELS_OF_A_TILE,
        )
        _KEEP.launch(
            (len(batch.runs), triton.cdiv(heads.channels, CHANNELS_OF_A_STEP)), variant,
            x, kept, batch.tiles, batch.runs, *fixed, CHANNELS_OF_A_STEP,
        )  # fmt: skip
    return out


@triton.jit
def _column(
    c, KEYS: tl.constexpr, DK: tl.constexpr, WIDTH: tl.constexpr,
    Q: tl.constexpr, Q_STEP: tl.constexpr, K: tl.constexpr, K_STEP: tl.constexpr, V: tl.constexpr, V_STEP: tl.constexpr,
):  # fmt: skip
    """The channel's column in a row of the product."""
    q = Q + c // DK * Q_STEP + c % DK
    k = K + (c - KEYS) // DK * K_STEP + c % DK
    at = c - 2 * KEYS
    v = V + at // WIDTH * V_STEP + at % WIDTH
    return tl.where(c < KEYS, q, tl.where(c < 2 * KEYS, k, v))


@triton.jit
def _silu(x, dtype: tl.constexpr):
    x = x.to(dtype).to(tl.float32)
    return (x / (1.0 + tl.exp(-x))).to(dtype)


@triton.jit
def _step(
    x, weight_CK, kept, moves_S2, out_TC,
    ROW: tl.constexpr, BLOCK: tl.constexpr, PLANE: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    KEYS: tl.constexpr, DK: tl.constexpr, WIDTH: tl.constexpr,
    Q: tl.constexpr, Q_STEP: tl.constexpr, K: tl.constexpr, K_STEP: tl.constexpr, V: tl.constexpr, V_STEP: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source, target = tl.load(moves_S2 + row * 2).to(tl.int64), tl.load(moves_S2 + row * 2 + 1).to(tl.int64)
    if target >= 0:
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = c < C
        column = _column(c, KEYS, DK, WIDTH, Q, Q_STEP, K, K_STEP, V, V_STEP)
        new = tl.load(x + row * ROW + column, mask=inside, other=0.0)
        total = new.to(tl.float32) * tl.load(weight_CK + c * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS - 1):
            old = tl.load(kept + source * BLOCK + tap * PLANE + c, mask=inside & (source >= 0), other=0.0)
            total += old.to(tl.float32) * tl.load(weight_CK + c * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            if tap > 0:
                tl.store(kept + target * BLOCK + (tap - 1) * PLANE + c, old, mask=inside)
        tl.store(kept + target * BLOCK + (TAPS - 2) * PLANE + c, new, mask=inside)
        tl.store(out_TC + row * C + c, _silu(total, out_TC.dtype.element_ty), mask=inside)


@triton.jit
def _tiles(
    x, weight_CK, kept, tiles_I8, out_TC,
    ROW: tl.constexpr, BLOCK: tl.constexpr, PLANE: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    KEYS: tl.constexpr, DK: tl.constexpr, WIDTH: tl.constexpr,
    Q: tl.constexpr, Q_STEP: tl.constexpr, K: tl.constexpr, K_STEP: tl.constexpr, V: tl.constexpr, V_STEP: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    tile = tiles_I8 + tl.program_id(0).to(tl.int64) * 8
    first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    begin, before = tl.load(tile + 4).to(tl.int64), tl.load(tile + 5).to(tl.int64)
    if count > 0:
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        column = _column(c, KEYS, DK, WIDTH, Q, Q_STEP, K, K_STEP, V, V_STEP)[None, :]
        r = tl.arange(0, ROWS)
        row = first + r
        inside = (r < count)[:, None] & (c < C)[None, :]
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for tap in tl.static_range(TAPS):
            at = row - (TAPS - 1 - tap)
            is_new = (at >= begin)[:, None]
            value = tl.load(x + at[:, None] * ROW + column, mask=inside & is_new, other=0.0)
            if tap < TAPS - 1:
                plane = (at - begin + TAPS - 1)[:, None]
                there = inside & (at < begin)[:, None] & (before >= 0)
                old = tl.load(kept + before * BLOCK + plane * PLANE + c[None, :], mask=there, other=0.0)
                value = tl.where(is_new, value, old)
            weight = tl.load(weight_CK + c * TAPS + tap, mask=c < C, other=0.0)
            total += value.to(tl.float32) * weight.to(tl.float32)[None, :]
        tl.store(out_TC + row[:, None] * C + c[None, :], _silu(total, out_TC.dtype.element_ty), mask=inside)


@triton.jit
def _keep(
    x, kept, tiles_I8, runs_P2,
    ROW: tl.constexpr, BLOCK: tl.constexpr, PLANE: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
    KEYS: tl.constexpr, DK: tl.constexpr, WIDTH: tl.constexpr,
    Q: tl.constexpr, Q_STEP: tl.constexpr, K: tl.constexpr, K_STEP: tl.constexpr, V: tl.constexpr, V_STEP: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The last tile first: only the first ones may write the block that all read. Planes in order: each reads a later one."""
    run = tl.program_id(0).to(tl.int64)
    first, count = tl.load(runs_P2 + run * 2).to(tl.int64), tl.load(runs_P2 + run * 2 + 1)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    column = _column(c, KEYS, DK, WIDTH, Q, Q_STEP, K, K_STEP, V, V_STEP)
    for back in range(count):
        tile = tiles_I8 + (first + count - 1 - back) * 8
        target = tl.load(tile + 3).to(tl.int64)
        if target >= 0:
            begin, before = tl.load(tile + 4).to(tl.int64), tl.load(tile + 5).to(tl.int64)
            end = tl.load(tile).to(tl.int64) + tl.load(tile + 1)
            for plane in tl.static_range(TAPS - 1):
                at = end - (TAPS - 1) + plane
                new = tl.load(x + at * ROW + column, mask=inside & (at >= begin), other=0.0)
                there = inside & (at < begin) & (before >= 0)
                old = tl.load(kept + before * BLOCK + (at - begin + TAPS - 1) * PLANE + c, mask=there, other=0.0)
                tl.store(kept + target * BLOCK + plane * PLANE + c, tl.where(at >= begin, new, old), mask=inside)


_STEP, _TILES, _KEEP = Kernel(_step), Kernel(_tiles), Kernel(_keep)
