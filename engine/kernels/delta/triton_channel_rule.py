"""Triton version of `channel_rule`. T tokens, H heads, Dk and Dv head sizes, I tiles.

A program has some columns of one head's state in registers. It goes through a prompt token by token: decays of channels leave no
product of keys that a tile could begin with, unless each pair of tokens is weighed by itself.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.delta.plan import DeltaHeads, StateBatch
from engine.kernels.delta.rule import NORM_EPS
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
    columns = min(MAX_COLUMNS, triton.next_power_of_2(dim))
    fixed = (
        x.stride(0), decays.stride(0), states.stride(0), num, heads.key_dim, triton.next_power_of_2(heads.key_dim), dim,
        heads.b.first, heads.b.step, NORM_EPS, columns,
    )  # fmt: skip
    variant = (mixed.dtype, states.data_ptr() % 16, fixed)
    if len(batch.moves):
        _STEP.launch(
            (len(batch.moves), num, triton.cdiv(dim, columns)), variant,
            mixed, x, decays, decay, bias, states, batch.moves, out, *fixed,
        )  # fmt: skip
    if len(batch.runs):
        _RUNS.launch(
            (len(batch.runs), num, triton.cdiv(dim, columns)), variant,
            mixed, x, decays, decay, bias, states, batch.tiles, batch.runs, out, *fixed,
        )  # fmt: skip
    return out


@triton.jit
def _token(
    state, mixed_TC, x, decays, decay_H, bias_HD, out_THD, row, head, d, n,
    ROW: tl.constexpr, DECAYS: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    B: tl.constexpr, B_STEP: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Store a token's output, and return the state behind it."""
    C: tl.constexpr = 2 * H * DK + H * DV
    q = tl.load(mixed_TC + row * C + head * DK + d, mask=d < DK, other=0.0).to(tl.float32)
    k = tl.load(mixed_TC + row * C + H * DK + head * DK + d, mask=d < DK, other=0.0).to(tl.float32)
    v = tl.load(mixed_TC + row * C + 2 * H * DK + head * DV + n, mask=n < DV, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * (1.0 / DK**0.5)
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
    beta = sigmoid(tl.load(x + row * ROW + B + head * B_STEP))
    a = tl.load(decays + row * DECAYS + head * DK + d, mask=d < DK, other=0.0).to(tl.float32)
    a += tl.load(bias_HD + head * DK + d, mask=d < DK, other=0.0)
    g = -tl.exp(tl.load(decay_H + head)) * softplus(a)
    state *= tl.exp(g)[:, None]
    added = beta * (v - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * added[None, :]
    out = tl.sum(state * q[:, None], axis=0)
    tl.store(out_THD + (row * H + head) * DV + n, out.to(out_THD.dtype.element_ty), mask=n < DV)
    return state


@triton.jit
def _step(
    mixed_TC, x, decays, decay_H, bias_HD, states, moves_S2, out_THD,
    ROW: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, DK: tl.constexpr,
    DK_PADDED: tl.constexpr, DV: tl.constexpr, B: tl.constexpr, B_STEP: tl.constexpr, EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, target = tl.load(moves_S2 + row * 2).to(tl.int64), tl.load(moves_S2 + row * 2 + 1).to(tl.int64)
    if target >= 0:
        d, n = tl.arange(0, DK_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (d < DK)[:, None] & (n < DV)[None, :]
        at = head * (DK * DV) + d[:, None] * DV + n[None, :]
        state = tl.load(states + source * BLOCK + at, mask=inside & (source >= 0), other=0.0)
        state = _token(
            state, mixed_TC, x, decays, decay_H, bias_HD, out_THD, row, head, d, n,
            ROW, DECAYS, H, DK, DV, B, B_STEP, EPS,
        )  # fmt: skip
        tl.store(states + target * BLOCK + at, state, mask=inside)


@triton.jit
def _runs(
    mixed_TC, x, decays, decay_H, bias_HD, states, tiles_I8, runs_P2, out_THD,
    ROW: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, DK: tl.constexpr,
    DK_PADDED: tl.constexpr, DV: tl.constexpr, B: tl.constexpr, B_STEP: tl.constexpr, EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    run, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_tile, num_tiles = tl.load(runs_P2 + run * 2).to(tl.int64), tl.load(runs_P2 + run * 2 + 1)
    d, n = tl.arange(0, DK_PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < DK)[:, None] & (n < DV)[None, :]
    at = head * (DK * DV) + d[:, None] * DV + n[None, :]
    state = tl.zeros((DK_PADDED, COLUMNS), tl.float32)
    for index in range(num_tiles):
        tile = tiles_I8 + (first_tile + index) * 8
        first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        source, target = tl.load(tile + 2).to(tl.int64), tl.load(tile + 3).to(tl.int64)
        if source >= 0:
            state = tl.load(states + source * BLOCK + at, mask=inside, other=0.0)
        for step in range(count):
            state = _token(
                state, mixed_TC, x, decays, decay_H, bias_HD, out_THD, first + step, head, d, n,
                ROW, DECAYS, H, DK, DV, B, B_STEP, EPS,
            )  # fmt: skip
        if target >= 0:
            tl.store(states + target * BLOCK + at, state, mask=inside)


_STEP, _RUNS = Kernel(_step), Kernel(_runs)
