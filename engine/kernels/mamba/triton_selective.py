"""Triton version of `selective`. T tokens, D channels, N numbers of a channel's state, I tiles.

A decoding token's program has some channels of one sequence, and goes on through the drafted tokens behind it. For prompts, a
program goes through all tokens with its channels' states in registers. What several tokens need of memory is asked for before
the first of them is computed.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.delta.plan import StateBatch
from engine.kernels.delta.triton_moves import CARRIED, carried_target
from engine.kernels.launch import Kernel
from engine.kernels.triton_activation import softplus

# State elements of a program. A prompt's programs are one warp, so tokens need no synchronisation.
STATES_OF_A_STEP, STATES_OF_A_RUN = 2048, 256
AHEAD = 8  # tokens prefetched


def selective_scan(
    mixed: torch.Tensor,
    x: torch.Tensor,
    steps: torch.Tensor,
    shared: torch.Tensor,
    rates: torch.Tensor,
    bias: torch.Tensor,
    skip: torch.Tensor,
    states: torch.Tensor,
    batch: StateBatch,
) -> torch.Tensor:
    out = torch.empty_like(mixed)
    channels, size = rates.shape
    padded = triton.next_power_of_2(size)
    fixed = (x.stride(0), steps.stride(0), states.stride(0), channels, size, padded)
    variant = (mixed.dtype, states.data_ptr() % 16, fixed)
    given = (mixed, x, steps, shared, rates, bias, skip, states)
    if len(batch.moves):
        columns = max(1, STATES_OF_A_STEP // padded)
        grid = (len(batch.moves), triton.cdiv(channels, columns))
        _STEP.launch(grid, variant, *given, batch.moves, out, *fixed, columns)
    if len(batch.runs):
        columns = max(1, STATES_OF_A_RUN // padded)
        grid = (len(batch.runs), triton.cdiv(channels, columns))
        _RUN.launch(grid, variant, *given, batch.tiles, batch.runs, out, *fixed, columns, AHEAD, num_warps=1)
    return out


@triton.jit
def _token(state, value, z, length, k, q, rates, bias, skip):
    """Return the state after a token, and its output. A step of -inf changes nothing."""
    value, z = value.to(tl.float32), z.to(tl.float32)
    length = softplus(length.to(tl.float32) + bias)
    state = state * tl.exp(length[:, None] * rates) + (length * value)[:, None] * k.to(tl.float32)[None, :]
    out = tl.sum(state * q.to(tl.float32)[None, :], axis=1) + skip * value
    return state, out * (z / (1.0 + tl.exp(-z)))


@triton.jit
def _step(
    mixed_TD, x, steps, shared_T2N, rates_DN, bias_D, skip_D, states, moves_S2, out_TD,
    ROW: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, N: tl.constexpr, N_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source, target = tl.load(moves_S2 + row * 2).to(tl.int64), tl.load(moves_S2 + row * 2 + 1).to(tl.int64)
    if (target >= 0) & (source != CARRIED):
        d, n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, N_PADDED)
        inside, at = (d < D)[:, None] & (n < N)[None, :], d[:, None] * N + n[None, :]
        state = tl.load(states + source * BLOCK + at, mask=inside & (source >= 0), other=0.0)
        while target >= 0:
            following = carried_target(moves_S2, row)
            state, out = _token(
                state,
                tl.load(mixed_TD + row * D + d, mask=d < D, other=0.0),
                tl.load(x + row * ROW + D + d, mask=d < D, other=0.0),
                tl.load(steps + row * STEPS + d, mask=d < D, other=0.0),
                tl.load(shared_T2N + row * (2 * N) + n, mask=n < N, other=0.0),
                tl.load(shared_T2N + row * (2 * N) + N + n, mask=n < N, other=0.0),
                tl.load(rates_DN + at, mask=inside, other=0.0),
                tl.load(bias_D + d, mask=d < D, other=0.0),
                tl.load(skip_D + d, mask=d < D, other=0.0),
            )
            tl.store(states + target * BLOCK + at, state, mask=inside)
            tl.store(out_TD + row * D + d, out.to(out_TD.dtype.element_ty), mask=d < D)
            row, target = row + 1, following


@triton.jit
def _run(
    mixed_TD, x, steps, shared_T2N, rates_DN, bias_D, skip_D, states, tiles_I8, runs_P2, out_TD,
    ROW: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, N: tl.constexpr, N_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0).to(tl.int64)
    first_tile, num_tiles = tl.load(runs_P2 + run * 2).to(tl.int64), tl.load(runs_P2 + run * 2 + 1)
    d, n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, N_PADDED)
    inside, at = (d < D)[:, None] & (n < N)[None, :], d[:, None] * N + n[None, :]
    rates = tl.load(rates_DN + at, mask=inside, other=0.0)
    bias, skip = tl.load(bias_D + d, mask=d < D, other=0.0), tl.load(skip_D + d, mask=d < D, other=0.0)
    state = tl.zeros((COLUMNS, N_PADDED), tl.float32)
    for index in range(num_tiles):
        tile = tiles_I8 + (first_tile + index) * 8
        first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        source, target = tl.load(tile + 2).to(tl.int64), tl.load(tile + 3).to(tl.int64)
        if source >= 0:
            state = tl.load(states + source * BLOCK + at, mask=inside, other=0.0)
        for begin in range(0, count, AHEAD):
            values, gates, lengths, keys, queries = (), (), (), (), ()
            for ahead in tl.static_range(AHEAD):
                row, is_there = first + begin + ahead, begin + ahead < count
                there, those = is_there & (d < D), is_there & (n < N)
                values += (tl.load(mixed_TD + row * D + d, mask=there, other=0.0),)
                gates += (tl.load(x + row * ROW + D + d, mask=there, other=0.0),)
                lengths += (tl.load(steps + row * STEPS + d, mask=there, other=float("-inf")),)
                keys += (tl.load(shared_T2N + row * (2 * N) + n, mask=those, other=0.0),)
                queries += (tl.load(shared_T2N + row * (2 * N) + N + n, mask=those, other=0.0),)
            for ahead in tl.static_range(AHEAD):
                state, out = _token(
                    state, values[ahead], gates[ahead], lengths[ahead], keys[ahead], queries[ahead], rates, bias, skip
                )  # fmt: skip
                there = (begin + ahead < count) & (d < D)
                row = first + begin + ahead
                tl.store(out_TD + row * D + d, out.to(out_TD.dtype.element_ty), mask=there)
        if target >= 0:
            tl.store(states + target * BLOCK + at, state, mask=inside)


def three_norms(x: torch.Tensor, weight: torch.Tensor, eps: float, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, half = len(x), (x.shape[1] - rank) // 2
    few, shared = x.new_empty(rows, rank), x.new_empty(rows, 2 * half)
    if rows:
        fixed = (x.stride(0), rank, triton.next_power_of_2(rank), half, triton.next_power_of_2(half))
        _NORMS.launch((rows,), (x.dtype, fixed), x, weight, few, shared, eps, *fixed)
    return few, shared


@triton.jit
def _norms(
    x, weight, few_TR, shared_T2N, eps,
    ROW: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, N: tl.constexpr, N_PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    r, n = tl.arange(0, R_PADDED), tl.arange(0, N_PADDED)
    _normed(x + row * ROW, weight, few_TR + row * R, r, eps, R)
    _normed(x + row * ROW + R, weight + R, shared_T2N + row * (2 * N), n, eps, N)
    _normed(x + row * ROW + R + N, weight + R + N, shared_T2N + row * (2 * N) + N, n, eps, N)


@triton.jit
def _normed(x, weight, out, at, eps, SIZE: tl.constexpr):
    value = tl.load(x + at, mask=at < SIZE, other=0.0)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    scale = tl.load(weight + at, mask=at < SIZE, other=0.0)
    tl.store(out + at, scale * wide.to(value.dtype), mask=at < SIZE)


_STEP, _RUN, _NORMS = Kernel(_step), Kernel(_run), Kernel(_norms)
