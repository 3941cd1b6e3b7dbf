"""Prefill attention: causal, variable lengths, loads by the GPU's bulk copy engine (TMA).

T tokens of S sequences, C positions of their contexts, Hq query heads, Hkv key and value heads, D head size, B block size; a
program computes M queries of one head, N positions a loop step, with an online softmax (Milakov and Gimelshein, 2018). The copy
engine needs rows at regular distances: prompts without a cached prefix are read where the projection wrote them, others are
gathered from the pool first, which costs little.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.attention.plan import Scores
from engine.kernels.attention.split import LONGEST_STEP, SMALL_TILE
from engine.kernels.attention.triton_scores import LOG2_E, first_seen, softcapped
from engine.kernels.codes import Codes, head_dim
from engine.kernels.codes.triton_codes import (
    FP8,
    INT4,
    INT8,
    NUMBERS,
    bytes_of,
    kind_of,
    place_of,
    scales_of,
    step_of,
    widened,
    zero_of,
)
from engine.kernels.device import describe
from engine.kernels.launch import Kernel

LONG_CONTEXT = 2048  # positions; larger loop steps win beyond (measured on an H200)
GATHERED_ROWS = 16  # positions that a program copies of a block
GATHERS_PER_PROCESSOR = 2  # programs; a captured graph's capacity for blocks is mostly empty


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    how: Scores,
    *,
    rows: int,
    num_kv_heads: int,
    max_context_len: int,
) -> None:
    """Write every row of `out` [T, Hq, D] for `q` of the same shape, both contiguous.

    `keys` and `values` [C, Hkv D]: rows at a regular distance. `tiles` [I, 8] int32 of `rows` queries, from
    `split.deal_out_tiles`.
    """
    num_heads, head_dim = q.shape[1:]
    step, warps, stages = _shape(head_dim, rows, max_context_len)
    padded = max(16, triton.next_power_of_2(head_dim))
    shape, strides = list(keys.shape), list(keys.stride())
    fixed = (
        num_heads,
        num_kv_heads,
        head_dim,
        padded,
        rows,
        step,
        stages,
        how.window != 0,
        how.window < 0,
        how.softcap,
        how.sinks is not None,
    )
    _PREFILL.launch(
        (num_heads, tiles.shape[0]), (q.dtype, *fixed),
        q, TensorDescriptor(keys, shape, strides, [step, padded]), TensorDescriptor(values, shape, strides, [step, padded]),
        tiles, out, how.sinks, how.scale * LOG2_E, abs(how.window), *fixed,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _shape(head_dim: int, rows: int, max_context_len: int) -> tuple[int, int, int]:
    """Positions of a loop step, warps and stages with this many queries in a tile."""
    if head_dim > 128:
        return (64, 8, 2)
    return (64 if max_context_len <= LONG_CONTEXT else LONGEST_STEP, 4 if rows == SMALL_TILE else 8, 3)


def gather_context(
    kv_layer: torch.Tensor, blocks: torch.Tensor, codes: Codes | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values [I B, Hkv D] of `blocks` [I, 2] int32: id, written positions. Others become 0.

    A negative id is no block: nothing is written there. `codes` become the numbers that `rope_and_write_kv` left in place.
    """
    block_size, num_kv_heads = kv_layer.shape[2:4]
    dim = head_dim(kv_layer, codes)
    width = num_kv_heads * dim
    dtype = kv_layer.dtype if codes is None else codes.dtype
    out = torch.empty((2, blocks.shape[0] * block_size, width), dtype=dtype, device=kv_layer.device)
    factors, scales, scale_block, scale_plane = scales_of(codes)
    programs = GATHERS_PER_PROCESSOR * describe(kv_layer.device).processors
    rows = min(block_size, GATHERED_ROWS)
    _GATHER.launch(
        (min(blocks.shape[0], programs), 2, triton.cdiv(block_size, rows)), None,
        bytes_of(kv_layer, codes), factors, scales, blocks, blocks.shape[0], out, kv_layer.stride(0), kv_layer.stride(1),
        out.stride(0), scale_block, scale_plane, CODES=kind_of(codes, kv_layer.device), D=dim,
        SIZE=block_size * width, WIDTH=width, PIECE=rows * width, PADDED=triton.next_power_of_2(rows * width), num_warps=8,
    )  # fmt: skip
    return out[0], out[1]


@triton.jit
def _gather(
    kv, factors_2, scales, blocks_I2, num_blocks, out, kv_block, kv_plane, out_plane, scale_block, scale_plane,
    CODES: tl.constexpr, D: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    plane, piece = tl.program_id(1), tl.arange(0, PADDED)
    at = tl.program_id(2) * PIECE + piece
    for index in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        item = tl.cast(index, tl.int64)
        block, written = tl.load(blocks_I2 + item * 2).to(tl.int64), tl.load(blocks_I2 + item * 2 + 1)
        if block >= 0:
            there = (piece < PIECE) & (at < written * WIDTH)
            values = tl.load(kv + block * kv_block + plane * kv_plane + place_of(at, CODES), mask=there, other=0)
            if CODES != NUMBERS:
                wide = widened(values, tl.float32, CODES, at)
                if CODES == INT4:
                    both = tl.load(scales + block * scale_block + plane * scale_plane + at // D, mask=there, other=0)
                    wide = wide * step_of(both) + zero_of(both)
                if CODES == INT8:
                    wide *= tl.load(scales + block * scale_block + plane * scale_plane + at // D, mask=there, other=0.0)
                if CODES >= FP8:
                    wide *= tl.load(factors_2 + plane)
                values = wide.to(out.dtype.element_ty)
            tl.store(out + plane * out_plane + item * SIZE + at, values, mask=(piece < PIECE) & (at < SIZE))


@triton.jit(do_not_specialize=["window"])
def _prefill(
    q_THD, keys, values, tiles_I8, out_THD, sinks_H, scale_log2, window,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tiles_I8 + tl.program_id(1) * 8
    first_row, num_rows = tl.load(tile), tl.load(tile + 1)
    first_position, context = tl.load(tile + 2), tl.load(tile + 3)
    m, d = tl.arange(0, M), tl.arange(0, D_PADDED)
    offsets = (first_row + m).to(tl.int64)[:, None] * (HQ * D) + head * D + d[None, :]
    there = (m < num_rows)[:, None] & (d < D)[None, :]
    q = tl.load(q_THD + offsets, mask=there, other=0.0)
    position = first_position + m
    column = head // (HQ // HKV) * D

    sums = tl.zeros((M, D_PADDED), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    end = first_position + num_rows  # one past the last row's position
    if HAS_WINDOW:
        masked = tl.maximum(0, first_seen(first_position, window, CHUNKED)) // N * N
    else:
        masked = (first_position + 1) // N * N  # up to here no row needs a mask
        for at in tl.range(0, masked, N, num_stages=STAGES):
            sums, top, total = _attend(
                q,
                keys,
                values,
                context,
                at,
                column,
                position,
                end,
                window,
                scale_log2,
                sums,
                top,
                total,
                N,
                False,
                False,
                False,
                SOFTCAP,
            )
    for at in tl.range(masked, end, N, num_stages=STAGES if HAS_WINDOW else 1):
        sums, top, total = _attend(
            q,
            keys,
            values,
            context,
            at,
            column,
            position,
            end,
            window,
            scale_log2,
            sums,
            top,
            total,
            N,
            True,
            HAS_WINDOW,
            CHUNKED,
            SOFTCAP,
        )
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_H + head) * 1.4426950408889634 - top)
    tl.store(out_THD + offsets, (sums / total[:, None]).to(out_THD.dtype.element_ty), mask=there)


@triton.jit
def _attend(
    q, keys, values, context, at, column, position, end, window, scale_log2, sums, top, total,
    N: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One loop step: positions [at, at + N) of a context."""
    k = keys.load([context + at, column])
    scores = tl.dot(q, k.T, input_precision="ieee")
    if SOFTCAP > 0:  # the result is in units of `scale_log2`
        scores = softcapped(scores * scale_log2, SOFTCAP) / scale_log2
    if MASKED:
        n = at + tl.arange(0, N)
        seen = n[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (n[None, :] >= first_seen(position, window, CHUNKED)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top) if HAS_WINDOW else new_top  # nothing seen so far
    weights = tl.exp2(scores * scale_log2 - safe_top[:, None])
    decay = tl.exp2(top - safe_top)
    v = values.load([context + at, column])
    if MASKED:  # later positions belong to another request: 0 * NaN would be NaN
        v = tl.where((at + tl.arange(0, N) < end)[:, None], v, 0.0)
    sums = tl.dot(weights.to(v.dtype), v, sums * decay[:, None], input_precision="ieee")
    return sums, new_top, total * decay + tl.sum(weights, axis=1)


_GATHER, _PREFILL = Kernel(_gather), Kernel(_prefill)
