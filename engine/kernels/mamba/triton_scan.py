"""Triton version of `scan`. T tokens, H heads, P their size, G groups, N size of keys and queries, I tiles of M tokens.

A decoding token's program has some columns of one head's state, and goes on through the drafted tokens behind it. For prompts,
a program goes through all tiles with its columns of the state in registers.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.delta.plan import TILE_ROWS, StateBatch
from engine.kernels.delta.triton_moves import CARRIED, carried_target
from engine.kernels.launch import Kernel
from engine.kernels.mamba.heads import MambaHeads
from engine.kernels.triton_activation import softplus

MAX_COLUMNS = 32
LONGEST = torch.finfo(torch.float32).max  # a step size without a limit
STATE_OF_FOUR_WARPS = 128


def scan(
    mixed: torch.Tensor,
    x: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    batch: StateBatch,
    heads: MambaHeads,
) -> torch.Tensor:
    num, dim = heads.num_heads, heads.head_dim
    out = torch.empty((mixed.shape[0], heads.size), dtype=mixed.dtype, device=mixed.device)
    padded = max(16, triton.next_power_of_2(heads.state_size))
    columns = min(MAX_COLUMNS, max(16, triton.next_power_of_2(dim)))
    fixed = (
        x.stride(0), states.stride(0), num, heads.heads_of_a_group, heads.size, heads.keys_size, heads.state_size, padded, dim,
        heads.first_step, float(heads.shortest), min(float(heads.longest), LONGEST), columns,
    )  # fmt: skip
    variant = (mixed.dtype, states.data_ptr() % 16, fixed)
    blocks = triton.cdiv(dim, columns)
    if len(batch.moves):
        _STEP.launch(
            (len(batch.moves), num, blocks), variant,
            mixed, x, decay, bias, skip, states, batch.moves, out, *fixed,
        )  # fmt: skip
    if len(batch.runs):
        precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
        _TILES.launch(
            (len(batch.runs), num, blocks), variant,
            mixed, x, decay, bias, skip, states, batch.tiles, batch.runs, out, *fixed, TILE_ROWS, precision,
            num_stages=1, num_warps=4 if padded <= STATE_OF_FOUR_WARPS else 8,
        )  # fmt: skip
    return out


@triton.jit
def _steps(step, bias, SHORTEST: tl.constexpr, LONGEST: tl.constexpr):
    return tl.minimum(tl.maximum(softplus(step.to(tl.float32) + bias), SHORTEST), LONGEST)


@triton.jit
def _step(
    mixed_TC, x, decay_H, bias_H, skip_H, states, moves_S2, out_TD,
    ROW: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    N: tl.constexpr, N_PADDED: tl.constexpr, P: tl.constexpr,
    STEPS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(moves_S2 + row * 2).to(tl.int64), tl.load(moves_S2 + row * 2 + 1).to(tl.int64)
    if (target >= 0) & (source != CARRIED):
        C: tl.constexpr = D + 2 * KEYS
        n, p = tl.arange(0, N_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (n < N)[:, None] & (p < P)[None, :]
        at = head * (N * P) + n[:, None] * P + p[None, :]
        state = tl.load(states + source * BLOCK + at, mask=inside & (source >= 0), other=0.0)
        while target >= 0:
            following = carried_target(moves_S2, row)
            of_group = mixed_TC + row * C + D + head // RATIO * N + n
            k = tl.load(of_group, mask=n < N, other=0.0).to(tl.float32)
            q = tl.load(of_group + KEYS, mask=n < N, other=0.0).to(tl.float32)
            v = tl.load(mixed_TC + row * C + head * P + p, mask=p < P, other=0.0).to(tl.float32)
            step = _steps(tl.load(x + row * ROW + STEPS + head), tl.load(bias_H + head), SHORTEST, LONGEST)
            state = state * tl.exp(-tl.exp(tl.load(decay_H + head)) * step) + k[:, None] * (step * v)[None, :]
            tl.store(states + target * BLOCK + at, state, mask=inside)
            out = tl.sum(state * q[:, None], axis=0) + tl.load(skip_H + head) * v
            tl.store(out_TD + row * D + head * P + p, out.to(out_TD.dtype.element_ty), mask=p < P)
            row, target = row + 1, following


@triton.jit
def _tiles(
    mixed_TC, x, decay_H, bias_H, skip_H, states, tiles_I8, runs_P2, out_TD,
    ROW: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    N: tl.constexpr, N_PADDED: tl.constexpr, P: tl.constexpr,
    STEPS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, COLUMNS: tl.constexpr,
    M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    run, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_tile, num_tiles = tl.load(runs_P2 + run * 2).to(tl.int64), tl.load(runs_P2 + run * 2 + 1)
    C: tl.constexpr = D + 2 * KEYS
    m, n, p = tl.arange(0, M), tl.arange(0, N_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (p < P)[None, :]
    at = head * (N * P) + n[:, None] * P + p[None, :]
    rate, bias, skip = -tl.exp(tl.load(decay_H + head)), tl.load(bias_H + head), tl.load(skip_H + head)
    state = tl.zeros((N_PADDED, COLUMNS), tl.float32)
    for index in range(num_tiles):
        tile = tiles_I8 + (first_tile + index) * 8
        first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        source, target = tl.load(tile + 2).to(tl.int64), tl.load(tile + 3).to(tl.int64)
        if source >= 0:
            state = tl.load(states + source * BLOCK + at, mask=inside, other=0.0)
        row, there = first + m, m < count
        of_group = mixed_TC + row[:, None] * C + D + head // RATIO * N + n[None, :]
        k = tl.load(of_group, mask=there[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        q = tl.load(of_group + KEYS, mask=there[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        written = there[:, None] & (p < P)[None, :]
        v = tl.load(mixed_TC + row[:, None] * C + head * P + p[None, :], mask=written, other=0.0).to(tl.float32)
        # Missing rows leave the state unchanged.
        step = _steps(tl.load(x + row * ROW + STEPS + head, mask=there, other=0.0), bias, SHORTEST, LONGEST)
        step = tl.where(there, step, 0.0)
        total, added = tl.cumsum(rate * step, axis=0), step[:, None] * v
        ratios = tl.exp(tl.where(m[:, None] >= m[None, :], total[:, None] - total[None, :], float("-inf")))
        seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * ratios
        out = tl.exp(total)[:, None] * tl.dot(q, state, input_precision=PRECISION) + skip * v
        out = tl.dot(seen, added, out, input_precision=PRECISION)
        tl.store(out_TD + row[:, None] * D + head * P + p[None, :], out.to(out_TD.dtype.element_ty), mask=written)
        last = tl.sum(tl.where(m == M - 1, total, 0.0), axis=0)
        left = k * tl.exp(last - total)[:, None]
        state = tl.dot(tl.trans(left), added, state * tl.exp(last), input_precision=PRECISION)
        if target >= 0:
            tl.store(states + target * BLOCK + at, state, mask=inside)


_STEP, _TILES = Kernel(_step), Kernel(_tiles)
