"""Triton version of `rule`. T tokens, Hv value heads, Dk and Dv head sizes, I tiles of M tokens, P prompts.

A decoding token's program has some columns of one head's state, and goes on through the drafted tokens behind it. For prompts,
a tile's triangular system depends on its keys alone: `_invert` inverts all systems at once, and a program of `_tiles` then goes
through a prompt with its columns of the state in registers (the chunked form: Yang, Wang, Zhang, Shen and Kim, 2024).
"""

import torch
import triton
import triton.language as tl

from engine.kernels.delta.plan import TILE_ROWS, DeltaHeads, StateBatch
from engine.kernels.delta.rule import NORM_EPS
from engine.kernels.delta.triton_moves import CARRIED, carried_target
from engine.kernels.launch import Kernel
from engine.kernels.triton_activation import sigmoid, softplus

MAX_COLUMNS_OF_A_STEP = 32
MAX_COLUMNS_OF_A_TILE = 32


def delta_rule(
    mixed: torch.Tensor,
    x: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor,
    batch: StateBatch,
    heads: DeltaHeads,
) -> torch.Tensor:
    num, dim = heads.num_value_heads, heads.value_dim
    out = torch.empty((mixed.shape[0], num, dim), dtype=mixed.dtype, device=mixed.device)
    keys, values = (max(16, triton.next_power_of_2(size)) for size in (heads.key_dim, dim))
    fixed = (
        x.stride(0), states.stride(0), num, heads.ratio, heads.keys_size, mixed.shape[1], heads.key_dim, keys, dim,
        heads.b.first, heads.b.step, heads.a.first, heads.a.step, heads.most_strength, NORM_EPS,
    )  # fmt: skip
    variant = (mixed.dtype, states.data_ptr() % 16, fixed)
    if len(batch.moves):
        columns = min(MAX_COLUMNS_OF_A_STEP, values)
        _STEP.launch(
            (len(batch.moves), num, triton.cdiv(dim, columns)), variant,
            mixed, x, decay, bias, states, batch.moves, out, *fixed, columns,
        )  # fmt: skip
    if len(batch.runs):
        columns, is_wide = min(MAX_COLUMNS_OF_A_TILE, values), mixed.dtype == torch.float32
        precise, precision = ("ieee", "ieee") if is_wide else ("tf32x3", "tf32")
        inverse = torch.empty((len(batch.tiles), num, TILE_ROWS, TILE_ROWS), dtype=torch.float32, device=mixed.device)
        _INVERT.launch(
            (len(batch.tiles), num), variant,
            mixed, x, decay, bias, batch.tiles, inverse, *fixed, TILE_ROWS, precise,
            num_stages=1,
        )  # fmt: skip
        _TILES.launch(
            (len(batch.runs), num, triton.cdiv(dim, columns)), variant,
            mixed, x, decay, bias, states, batch.tiles, batch.runs, inverse, out, *fixed, TILE_ROWS, columns, precision,
            num_stages=1,
        )  # fmt: skip
    return out


@triton.jit
def _decay(a, decay, bias):
    """The logarithm of a token's decay of the state."""
    return -tl.exp(decay) * softplus(a.to(tl.float32) + bias)


@triton.jit
def _step(
    mixed_TC, x, decay_H, bias_H, states, moves_S2, out_THD,
    ROW: tl.constexpr, BLOCK: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    B: tl.constexpr, B_STEP: tl.constexpr, A: tl.constexpr, A_STEP: tl.constexpr, MOST: tl.constexpr, EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(moves_S2 + row * 2).to(tl.int64), tl.load(moves_S2 + row * 2 + 1).to(tl.int64)
    if (target >= 0) & (source != CARRIED):
        group = head // RATIO
        d, n = tl.arange(0, DK_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (d < DK)[:, None] & (n < DV)[None, :]
        at = head * (DK * DV) + d[:, None] * DV + n[None, :]
        state = tl.load(states + source * BLOCK + at, mask=inside & (source >= 0), other=0.0)
        while target >= 0:
            following = carried_target(moves_S2, row)
            q = tl.load(mixed_TC + row * C + group * DK + d, mask=d < DK, other=0.0).to(tl.float32)
            k = tl.load(mixed_TC + row * C + KEYS + group * DK + d, mask=d < DK, other=0.0).to(tl.float32)
            v = tl.load(mixed_TC + row * C + 2 * KEYS + head * DV + n, mask=n < DV, other=0.0).to(tl.float32)
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * (1.0 / DK**0.5)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
            beta = MOST * sigmoid(tl.load(x + row * ROW + B + group * B_STEP + head % RATIO))
            a = tl.load(x + row * ROW + A + group * A_STEP + head % RATIO)
            state *= tl.exp(_decay(a, tl.load(decay_H + head), tl.load(bias_H + head)))
            added = beta * (v - tl.sum(state * k[:, None], axis=0))
            state += k[:, None] * added[None, :]
            tl.store(states + target * BLOCK + at, state, mask=inside)
            out = tl.sum(state * q[:, None], axis=0)
            tl.store(out_THD + (row * HV + head) * DV + n, out.to(out_THD.dtype.element_ty), mask=n < DV)
            row, target = row + 1, following


@triton.jit
def unit_rows(source, row, there, d, C: tl.constexpr, DK: tl.constexpr, EPS: tl.constexpr):
    x = tl.load(source + row[:, None] * C + d[None, :], mask=there[:, None] & (d < DK)[None, :], other=0.0).to(
        tl.float32
    )
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


@triton.jit
def _strengths(
    x, decay_H, bias_H, row, there, head,
    ROW: tl.constexpr, RATIO: tl.constexpr, B: tl.constexpr, B_STEP: tl.constexpr, A: tl.constexpr, A_STEP: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Beta, and the cumulative log decays, both [M]. Missing rows get 0."""
    group = head // RATIO
    b = tl.load(x + row * ROW + B + group * B_STEP + head % RATIO, mask=there, other=0.0)
    a = tl.load(x + row * ROW + A + group * A_STEP + head % RATIO, mask=there, other=0.0)
    g = tl.where(there, _decay(a, tl.load(decay_H + head), tl.load(bias_H + head)), 0.0)
    return tl.where(there, MOST * sigmoid(b), 0.0), tl.cumsum(g, axis=0)


@triton.jit
def _ratios(total, m, strictly: tl.constexpr):
    """Decay from one token (column) to a later one (row); 0 elsewhere."""
    seen = m[:, None] > m[None, :] if strictly else m[:, None] >= m[None, :]
    return tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def inverted(system, m, M: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + L [M, M], for L below the diagonal; m are its rows.

    Four blocks on the diagonal are inverted row after row. With their inverses D, and P = D times the blocks below them, I + L is
    D^-1 (I + P), and (I + P)^-1 = (I - P) (I + P P), because no product of four blocks below the diagonal is left. Products with
    D are four small ones: compiled as one of whole matrices, a thread would hold all rows of D, and registers would not do.
    """
    SIZE: tl.constexpr = M // 4
    i, j, block = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :], tl.arange(0, 4)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(is_own, tl.reshape(system, (4, SIZE, 4, SIZE)), 0.0), axis=2)
    inverses = tl.zeros((4, SIZE, SIZE), tl.float32) + tl.where(i == j, 1.0, 0.0)
    for row_of_block in range(1, SIZE):
        its = tl.sum(tl.where(i == row_of_block, own, 0.0), axis=1)
        new = tl.sum(its[:, :, None] * inverses, axis=1)
        inverses = tl.where(i == row_of_block, inverses - new[:, None, :], inverses)
    below = tl.where(m[:, None] // SIZE > m[None, :] // SIZE, system, 0.0)
    unit = tl.where(m[:, None] == m[None, :], 1.0, 0.0)
    rows = tl.dot(inverses, tl.reshape(below, (4, SIZE, M)), input_precision=PRECISION)
    below = tl.reshape(rows, (M, M))
    twice = tl.dot(below, below, input_precision=PRECISION)
    rest = tl.dot(unit - below, unit + twice, input_precision=PRECISION)
    columns = tl.permute(tl.reshape(rest, (M, 4, SIZE)), (1, 0, 2))
    columns = tl.dot(columns, inverses, input_precision=PRECISION)
    return tl.reshape(tl.permute(columns, (1, 0, 2)), (M, M))


@triton.jit
def _invert(
    mixed_TC, x, decay_H, bias_H, tiles_I8, inverse_IHMM,
    ROW: tl.constexpr, BLOCK: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    B: tl.constexpr, B_STEP: tl.constexpr, A: tl.constexpr, A_STEP: tl.constexpr, MOST: tl.constexpr, EPS: tl.constexpr,
    M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse of I + L, where L is tril(beta k k^T, -1) with decay, for each tile."""
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(tiles_I8 + index * 8).to(tl.int64), tl.load(tiles_I8 + index * 8 + 1)
    if count > 0:
        m, d = tl.arange(0, M), tl.arange(0, DK_PADDED)
        row, there = first + m, m < count
        k = unit_rows(mixed_TC + KEYS + head // RATIO * DK, row, there, d, C, DK, EPS)
        beta, total = _strengths(x, decay_H, bias_H, row, there, head, ROW, RATIO, B, B_STEP, A, A_STEP, MOST)
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * beta[:, None] * _ratios(total, m, True)
        inverse = inverted(system, m, M, PRECISION)
        at = (index * HV + head) * (M * M) + m[:, None] * M + m[None, :]
        tl.store(inverse_IHMM + at, inverse)


@triton.jit
def _tiles(
    mixed_TC, x, decay_H, bias_H, states, tiles_I8, runs_P2, inverse_IHMM, out_THD,
    ROW: tl.constexpr, BLOCK: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    B: tl.constexpr, B_STEP: tl.constexpr, A: tl.constexpr, A_STEP: tl.constexpr, MOST: tl.constexpr, EPS: tl.constexpr,
    M: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    run, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_tile, num_tiles = tl.load(runs_P2 + run * 2).to(tl.int64), tl.load(runs_P2 + run * 2 + 1)
    m, d, n = tl.arange(0, M), tl.arange(0, DK_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < DK)[:, None] & (n < DV)[None, :]
    at = head * (DK * DV) + d[:, None] * DV + n[None, :]
    state = tl.zeros((DK_PADDED, COLUMNS), tl.float32)
    for step in range(num_tiles):
        tile = tiles_I8 + (first_tile + step) * 8
        first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        source, target = tl.load(tile + 2).to(tl.int64), tl.load(tile + 3).to(tl.int64)
        if source >= 0:
            state = tl.load(states + source * BLOCK + at, mask=inside, other=0.0)
        row, there = first + m, m < count
        q = unit_rows(mixed_TC + head // RATIO * DK, row, there, d, C, DK, EPS) * (1.0 / DK**0.5)
        k = unit_rows(mixed_TC + KEYS + head // RATIO * DK, row, there, d, C, DK, EPS)
        beta, total = _strengths(x, decay_H, bias_H, row, there, head, ROW, RATIO, B, B_STEP, A, A_STEP, MOST)
        written = there[:, None] & (n < DV)[None, :]
        v = tl.load(mixed_TC + row[:, None] * C + 2 * KEYS + head * DV + n[None, :], mask=written, other=0.0)
        wanted = beta[:, None] * (
            v.to(tl.float32) - tl.exp(total)[:, None] * tl.dot(k, state, input_precision=PRECISION)
        )
        inverse = tl.load(inverse_IHMM + ((first_tile + step) * HV + head) * (M * M) + m[:, None] * M + m[None, :])
        added = tl.dot(inverse, wanted, input_precision=PRECISION)
        seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _ratios(total, m, False)
        out = tl.exp(total)[:, None] * tl.dot(q, state, input_precision=PRECISION)
        out = tl.dot(seen, added, out, input_precision=PRECISION)
        tl.store(out_THD + (row[:, None] * HV + head) * DV + n[None, :], out.to(out_THD.dtype.element_ty), mask=written)
        last = tl.sum(tl.where(m == M - 1, total, 0.0), axis=0)
        left = k * tl.exp(last - total)[:, None]
        state = tl.dot(tl.trans(left), added, state * tl.exp(last), input_precision=PRECISION)
        if target >= 0:
            tl.store(states + target * BLOCK + at, state, mask=inside)


_STEP, _INVERT, _TILES = Kernel(_step), Kernel(_invert), Kernel(_tiles)
