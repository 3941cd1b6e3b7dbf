"""Triton version of `channel_rule`. T tokens, H heads, Dk and Dv head sizes, I tiles of M tokens, P prompts.

A decoding token's program has some columns of one head's state. For prompts, what two tokens of a tile have to do with each other
depends on keys, queries and decays alone: `_pairs` weighs all pairs and inverts each tile's triangular system. A program of
`_tiles` then goes through a prompt with its columns of the state in registers (the chunked form: Yang, Kautz and Hatamizadeh,
2024; Kimi Team, 2025).

A decay from one token to a later one is a sum of logarithms between them, for each channel. It is never taken apart into two
that grow: within a piece of a tile each pair has its own sum; of two pieces, both sums end where the later piece begins.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.delta.plan import TILE_ROWS, DeltaHeads, StateBatch
from engine.kernels.delta.rule import NORM_EPS
from engine.kernels.delta.triton_moves import CARRIED, carried_target
from engine.kernels.delta.triton_rule import inverted, unit_rows
from engine.kernels.launch import Kernel
from engine.kernels.triton_activation import sigmoid, softplus

MAX_COLUMNS = 32


def channel_delta_rule(
    mixed: torch.Tensor,
    x: torch.Tensor,
    decays: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    batch: StateBatch,
    heads: DeltaHeads,
) -> torch.Tensor:
    num, dim = heads.num_value_heads, heads.value_dim
    out = torch.empty((mixed.shape[0], num, dim), dtype=mixed.dtype, device=mixed.device)
    keys, values = (max(16, triton.next_power_of_2(size)) for size in (heads.key_dim, dim))
    columns = min(MAX_COLUMNS, values)
    fixed = (
        x.stride(0), decays.stride(0), states.stride(0), num, heads.key_dim, keys, dim,
        heads.b.first, heads.b.step, NORM_EPS,
    )  # fmt: skip
    variant = (mixed.dtype, states.data_ptr() % 16, fixed)
    if len(batch.moves):
        _STEP.launch(
            (len(batch.moves), num, triton.cdiv(dim, columns)), variant,
            mixed, x, decays, decay, bias, states, batch.moves, out, *fixed, columns,
        )  # fmt: skip
    if len(batch.runs):
        precise, precision = ("ieee", "ieee") if mixed.dtype == torch.float32 else ("tf32x3", "tf32")
        pairs = torch.empty((2, len(batch.tiles), num, TILE_ROWS, TILE_ROWS), dtype=torch.float32, device=mixed.device)
        inverse, seen = pairs.unbind(0)
        _PAIRS.launch(
            (len(batch.tiles), num), variant,
            mixed, x, decays, decay, bias, batch.tiles, inverse, seen, *fixed, TILE_ROWS, precise, precision,
            num_stages=1,
        )  # fmt: skip
        _TILES.launch(
            (len(batch.runs), num, triton.cdiv(dim, columns)), variant,
            mixed, x, decays, decay, bias, states, batch.tiles, batch.runs, inverse, seen, out,
            *fixed, TILE_ROWS, columns, precision,
            num_stages=1, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def _step(
    mixed_TC, x, decays, decay_H, bias_HD, states, moves_S2, out_THD,
    ROW: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, DK: tl.constexpr,
    DK_PADDED: tl.constexpr, DV: tl.constexpr, B: tl.constexpr, B_STEP: tl.constexpr, EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(moves_S2 + row * 2).to(tl.int64), tl.load(moves_S2 + row * 2 + 1).to(tl.int64)
    if (target >= 0) & (source != CARRIED):
        C: tl.constexpr = 2 * H * DK + H * DV
        d, n = tl.arange(0, DK_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (d < DK)[:, None] & (n < DV)[None, :]
        at = head * (DK * DV) + d[:, None] * DV + n[None, :]
        state = tl.load(states + source * BLOCK + at, mask=inside & (source >= 0), other=0.0)
        while target >= 0:
            following = carried_target(moves_S2, row)
            q = tl.load(mixed_TC + row * C + head * DK + d, mask=d < DK, other=0.0).to(tl.float32)
            k = tl.load(mixed_TC + row * C + H * DK + head * DK + d, mask=d < DK, other=0.0).to(tl.float32)
            v = tl.load(mixed_TC + row * C + 2 * H * DK + head * DV + n, mask=n < DV, other=0.0).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * (1.0 / DK**0.5)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
            beta = sigmoid(tl.load(x + row * ROW + B + head * B_STEP))
            a = tl.load(decays + row * DECAYS + head * DK + d, mask=d < DK, other=0.0).to(tl.float32)
            a += tl.load(bias_HD + head * DK + d, mask=d < DK, other=0.0)
            state *= tl.exp(-tl.exp(tl.load(decay_H + head)) * softplus(a))[:, None]
            added = beta * (v - tl.sum(state * k[:, None], axis=0))
            state += k[:, None] * added[None, :]
            tl.store(states + target * BLOCK + at, state, mask=inside)
            out = tl.sum(state * q[:, None], axis=0)
            tl.store(out_THD + (row * H + head) * DV + n, out.to(out_THD.dtype.element_ty), mask=n < DV)
            row, target = row + 1, following


@triton.jit
def _logarithms(decays, decay_H, bias_HD, row, there, head, d, DECAYS: tl.constexpr, DK: tl.constexpr):
    """Return the log decay of each channel of each token, [.., Dk]. Missing rows get 0."""
    inside = there[:, None] & (d < DK)[None, :]
    a = tl.load(decays + row[:, None] * DECAYS + head * DK + d[None, :], mask=inside, other=0.0).to(tl.float32)
    a += tl.load(bias_HD + head * DK + d, mask=d < DK, other=0.0)[None, :]
    return tl.where(inside, -tl.exp(tl.load(decay_H + head)) * softplus(a), 0.0)


@triton.jit
def _strengths(x, row, there, head, ROW: tl.constexpr, B: tl.constexpr, B_STEP: tl.constexpr):
    return tl.where(there, sigmoid(tl.load(x + row * ROW + B + head * B_STEP, mask=there, other=0.0)), 0.0)


@triton.jit
def _product(x, y, PRECISION: tl.constexpr):
    """The product x y^T, both [16, Dk], with channels split over warps: whole operands would exceed the registers."""
    SIZE: tl.constexpr = x.shape[0]
    PART: tl.constexpr = x.shape[1] // 4 if x.shape[1] >= 64 else 16
    left = tl.permute(tl.reshape(x, (SIZE, x.shape[1] // PART, PART)), (1, 0, 2))
    right = tl.permute(tl.reshape(y, (SIZE, x.shape[1] // PART, PART)), (1, 2, 0))
    return tl.sum(tl.dot(left, right, input_precision=PRECISION), axis=0)


@triton.jit
def _pairs(
    mixed_TC, x, decays, decay_H, bias_HD, tiles_I8, inverse_IHMM, seen_IHMM,
    ROW: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, DK: tl.constexpr,
    DK_PADDED: tl.constexpr, DV: tl.constexpr, B: tl.constexpr, B_STEP: tl.constexpr, EPS: tl.constexpr,
    M: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each tile q k^T with decay up to the diagonal, and the inverse of I + L, where L is beta k k^T with decay below it."""
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(tiles_I8 + index * 8).to(tl.int64), tl.load(tiles_I8 + index * 8 + 1)
    if count > 0:
        C: tl.constexpr = 2 * H * DK + H * DV
        SIZE: tl.constexpr = M // 4
        m, i, d, block = tl.arange(0, M), tl.arange(0, SIZE), tl.arange(0, DK_PADDED), tl.arange(0, 4)
        queries, keys = mixed_TC + head * DK, mixed_TC + H * DK + head * DK
        place = (index * H + head) * (M * M)
        system = tl.zeros((4, SIZE, 4, SIZE), tl.float32)
        for piece in range(tl.cdiv(count, SIZE)):
            at = piece * SIZE + i
            row, there = first + at, at < count
            q = unit_rows(queries, row, there, d, C, DK, EPS) * (1.0 / DK**0.5)
            k = unit_rows(keys, row, there, d, C, DK, EPS)
            g = _logarithms(decays, decay_H, bias_HD, row, there, head, d, DECAYS, DK)
            beta = _strengths(x, row, there, head, ROW, B, B_STEP)
            # A reverse scan: for each row, the decay since that token.
            since = tl.zeros((SIZE, DK_PADDED), tl.float32)
            known, seen = tl.zeros((SIZE, SIZE), tl.float32), tl.zeros((SIZE, SIZE), tl.float32)
            for step in range(SIZE):
                token = SIZE - 1 - step
                is_it, is_later = i[:, None] == token, i[:, None] >= token
                left = tl.sum(tl.where(is_it, k, 0.0), axis=0)[None, :] * tl.where(is_later, tl.exp(since), 0.0)
                known = tl.where(i[None, :] == token, tl.sum(k * left, axis=1)[:, None], known)
                seen = tl.where(i[None, :] == token, tl.sum(q * left, axis=1)[:, None], seen)
                since += tl.where(is_later, tl.sum(tl.where(is_it, g, 0.0), axis=0)[None, :], 0.0)
            tl.store(seen_IHMM + place + at[:, None] * M + at[None, :], seen)
            known = tl.where(i[:, None] > i[None, :], known, 0.0) * beta[:, None]
            is_row = (block == piece)[:, None, None, None]
            system = tl.where(is_row & (block == piece)[None, None, :, None], known[None, :, None, :], system)
            q, k = q * tl.exp(since), k * tl.exp(since)
            between = tl.zeros((DK_PADDED,), tl.float32)  # decay of the pieces in between
            for back in range(piece):
                earlier = piece - 1 - back
                before, whole = first + earlier * SIZE + i, i < SIZE
                # Log decays of the tokens after each token, up to the piece's end.
                g = _logarithms(decays, decay_H, bias_HD, before + 1, i + 1 < SIZE, head, d, DECAYS, DK)
                left = unit_rows(keys, before, whole, d, C, DK, EPS)
                left *= tl.exp(tl.cumsum(g, axis=0, reverse=True) + between[None, :])
                seen = _product(q, left, PRECISION)
                tl.store(seen_IHMM + place + at[:, None] * M + earlier * SIZE + i[None, :], seen)
                known = _product(k, left, PRECISE) * beta[:, None]
                system = tl.where(is_row & (block == earlier)[None, None, :, None], known[None, :, None, :], system)
                g = _logarithms(decays, decay_H, bias_HD, before, whole, head, d, DECAYS, DK)
                between += tl.sum(g, axis=0)
        inverse = inverted(tl.reshape(system, (M, M)), m, M, PRECISE)
        tl.store(inverse_IHMM + place + m[:, None] * M + m[None, :], inverse)


@triton.jit
def _tiles(
    mixed_TC, x, decays, decay_H, bias_HD, states, tiles_I8, runs_P2, inverse_IHMM, seen_IHMM, out_THD,
    ROW: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, DK: tl.constexpr,
    DK_PADDED: tl.constexpr, DV: tl.constexpr, B: tl.constexpr, B_STEP: tl.constexpr, EPS: tl.constexpr,
    M: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    run, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_tile, num_tiles = tl.load(runs_P2 + run * 2).to(tl.int64), tl.load(runs_P2 + run * 2 + 1)
    C: tl.constexpr = 2 * H * DK + H * DV
    m, d, n = tl.arange(0, M), tl.arange(0, DK_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < DK)[:, None] & (n < DV)[None, :]
    at = head * (DK * DV) + d[:, None] * DV + n[None, :]
    state = tl.zeros((DK_PADDED, COLUMNS), tl.float32)
    # Hoisting loop invariants would fill the registers.
    for step in tl.range(num_tiles, disable_licm=True):
        tile = tiles_I8 + (first_tile + step) * 8
        first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        source, target = tl.load(tile + 2).to(tl.int64), tl.load(tile + 3).to(tl.int64)
        if source >= 0:
            state = tl.load(states + source * BLOCK + at, mask=inside, other=0.0)
        row, there = first + m, m < count
        pairs = ((first_tile + step) * H + head) * (M * M) + m[:, None] * M + m[None, :]
        g = _logarithms(decays, decay_H, bias_HD, row, there, head, d, DECAYS, DK)
        since, behind = tl.exp(tl.cumsum(g, axis=0)), tl.exp(tl.sum(g, axis=0))
        q = unit_rows(mixed_TC + head * DK, row, there, d, C, DK, EPS) * (1.0 / DK**0.5)
        out = tl.dot(q * since, state, input_precision=PRECISION)
        k = unit_rows(mixed_TC + H * DK + head * DK, row, there, d, C, DK, EPS)
        written = there[:, None] & (n < DV)[None, :]
        v = tl.load(mixed_TC + row[:, None] * C + 2 * H * DK + head * DV + n[None, :], mask=written, other=0.0)
        wanted = v.to(tl.float32) - tl.dot(k * since, state, input_precision=PRECISION)
        wanted *= _strengths(x, row, there, head, ROW, B, B_STEP)[:, None]
        added = tl.dot(tl.load(inverse_IHMM + pairs), wanted, input_precision=PRECISION)
        seen = tl.load(seen_IHMM + pairs, mask=there[:, None] & (m[:, None] >= m[None, :]), other=0.0)
        out = tl.dot(seen, added, out, input_precision=PRECISION)
        tl.store(out_THD + (row[:, None] * H + head) * DV + n[None, :], out.to(out_THD.dtype.element_ty), mask=written)
        # Keys are reloaded: there are no registers to keep them.
        k = unit_rows(mixed_TC + H * DK + head * DK, row, there, d, C, DK, EPS)
        later = _logarithms(decays, decay_H, bias_HD, row + 1, m + 1 < count, head, d, DECAYS, DK)
        left = k * tl.exp(tl.cumsum(later, axis=0, reverse=True))
        state = tl.dot(tl.trans(left), added, state * behind[:, None], input_precision=PRECISION)
        if target >= 0:
            tl.store(states + target * BLOCK + at, state, mask=inside)


_STEP, _PAIRS, _TILES = Kernel(_step), Kernel(_pairs), Kernel(_tiles)
