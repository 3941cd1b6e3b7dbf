"""Prefill attention straight from the paged pool: causal, variable lengths, GQA, sliding windows.

T tokens of S sequences, Hq query heads, Hkv key and value heads, D head size, B block size. A program computes M queries of one
head, N positions a loop step, with an online softmax (Milakov and Gimelshein, 2018). Only steps at the diagonal or the window's
edge pay for a mask; steps beyond are never read. It runs on every GPU and in float32; `triton_prefill` is faster where there is
a bulk copy engine.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention.plan import Scores
from engine.kernels.attention.triton_scores import LOG2_E, first_seen, softcapped
from engine.kernels.codes import Codes
from engine.kernels.codes.triton_codes import (
    FP8,
    INT4,
    INT8,
    bytes_of,
    kind_of,
    place_of,
    scales_of,
    step_of,
    widened,
    zero_of,
)
from engine.kernels.launch import Kernel

# Queries of a program, positions of a loop step, warps, stages: by (largest head size, bytes of an element). None spills.
SHAPES = {
    (64, 2): (128, 128, 8, 3),
    (128, 2): (128, 64, 8, 5),  # block ids are loaded before keys: this keeps two steps in flight
    (256, 2): (128, 32, 8, 3),
    (64, 4): (32, 32, 8, 1),
    (128, 4): (32, 16, 8, 1),
    (256, 4): (32, 16, 8, 1),
    (512, 2): (64, 32, 8, 2),
    (512, 4): (16, 16, 8, 1),
}
# Larger shapes spill with quantised KV.
OF_CODES = SHAPES | {(512, 2): (32, 32, 8, 1)}
OF_INT4 = SHAPES | {(512, 2): (16, 32, 8, 1)}
Shape = tuple[int, int, int, int]


def paged_prefill(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    how: Scores,
    codes: Codes | None = None,
    *,
    rows: int,
    shape: Shape | None = None,
) -> None:
    """Write every row of `out` [T, Hq, D]. A sequence's i-th new token attends to all positions up to its own.

    `kv_layer` [num_blocks, 2, B, Hkv, D] holds the new tokens already. `block_table` [S, most blocks] int32. `tiles` [I, 8]
    int32 of `rows` queries each, a power of two, from `split.deal_out_tiles`. `codes`: as in `paged_attention`. `shape` replaces
    the one in `SHAPES`, `OF_CODES` or `OF_INT4`.
    """
    num_heads, head_dim = q.shape[1:]
    size = q.element_size()
    if shape is None:
        shapes = SHAPES if codes is None else OF_INT4 if codes.kind == "int4" else OF_CODES
        shape = next(shape for (most, of), shape in shapes.items() if head_dim <= most and of == size)
    m, step, warps, stages = min(shape[0], rows), *shape[1:]
    factors, scales, scale_block, scale_plane = scales_of(codes)
    _PREFILL.launch(
        (num_heads, tiles.shape[0] * (rows // m)), None,
        q, bytes_of(kv_layer, codes), factors, scales, block_table, tiles, out, how.sinks, how.scale * LOG2_E, abs(how.window),
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), block_table.stride(0),
        kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), kv_layer.stride(3), scale_block, scale_plane,
        G=num_heads // kv_layer.shape[3], HKV=kv_layer.shape[3], B=kv_layer.shape[2],
        D=head_dim, D_PADDED=max(16, triton.next_power_of_2(head_dim)),
        M=m, PIECES=rows // m, N=step, STAGES=stages, HAS_WINDOW=how.window != 0, CHUNKED=how.window < 0,
        SOFTCAP=how.softcap, HAS_SINKS=how.sinks is not None, CODES=kind_of(codes, q.device), num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _prefill(
    q_THD, kv, factors_2, scales, block_table, tiles_I8, out_THD, sinks_H, scale_log2, window,
    q_token, q_head, out_token, out_head, table_row, kv_block, kv_plane, kv_slot, kv_head, scale_block, scale_plane,
    G: tl.constexpr, HKV: tl.constexpr, B: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    M: tl.constexpr, PIECES: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tiles_I8 + tl.program_id(1) // PIECES * 8
    skipped = tl.program_id(1) % PIECES * M
    num_rows = tl.minimum(M, tl.load(tile + 1) - skipped)
    if num_rows <= 0:
        return
    first_row, first_position = tl.load(tile) + skipped, tl.load(tile + 2) + skipped
    table = block_table + tl.load(tile + 4).to(tl.int64) * table_row
    head_kv = kv + head // G * kv_head
    head_scales = scales + head // G if (CODES == INT8) | (CODES == INT4) else scales
    if CODES >= FP8:
        scale_log2 *= tl.load(factors_2)

    m, d = tl.arange(0, M), tl.arange(0, D_PADDED)
    token = (first_row + m).to(tl.int64)
    there = (m < num_rows)[:, None] & (d < D)[None, :]
    q = tl.load(q_THD + token[:, None] * q_token + head * q_head + d[None, :], mask=there, other=0.0)

    end = first_position + num_rows  # one past the last row's position
    seen_by_all = (first_position + 1) // N * N
    if HAS_WINDOW:
        begin = tl.maximum(0, first_seen(first_position, window, CHUNKED))
        first = begin // N * N
        last = first_seen(first_position + M - 1, window, CHUNKED)
        inner = tl.minimum(tl.cdiv(tl.maximum(0, last), N) * N, tl.cdiv(end, N) * N)
        seen_by_all = tl.maximum(seen_by_all, inner)
    else:
        begin, inner = 0, 0

    sums = tl.zeros((M, D_PADDED), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if HAS_WINDOW:
        sums, top, total = _span(
            first, inner, begin, end, q, sums, top, total, head_kv, table, first_position, window, scale_log2,
            kv_block, kv_plane, kv_slot, head_scales, scale_block, scale_plane, HKV, CODES,
            B, D, D_PADDED, M, N, STAGES, True, True, CHUNKED, SOFTCAP,
        )  # fmt: skip
    sums, top, total = _span(
        inner, seen_by_all, begin, end, q, sums, top, total, head_kv, table, first_position, window, scale_log2,
        kv_block, kv_plane, kv_slot, head_scales, scale_block, scale_plane, HKV, CODES,
        B, D, D_PADDED, M, N, STAGES, False, HAS_WINDOW, CHUNKED, SOFTCAP,
    )  # fmt: skip
    sums, top, total = _span(
        seen_by_all, end, begin, end, q, sums, top, total, head_kv, table, first_position, window, scale_log2,
        kv_block, kv_plane, kv_slot, head_scales, scale_block, scale_plane, HKV, CODES,
        B, D, D_PADDED, M, N, 1, True, HAS_WINDOW, CHUNKED, SOFTCAP,
    )  # fmt: skip
    if CODES >= FP8:
        sums *= tl.load(factors_2 + 1)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_H + head) * 1.4426950408889634 - top)
    target = out_THD + token[:, None] * out_token + head * out_head + d[None, :]
    tl.store(target, (sums / total[:, None]).to(out_THD.dtype.element_ty), mask=there)


@triton.jit
def _span(
    at_first, at_end, begin, end, q, sums, top, total, head_kv, table, first_position, window, scale_log2,
    kv_block, kv_plane, kv_slot, head_scales, scale_block, scale_plane, HKV: tl.constexpr, CODES: tl.constexpr,
    B: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Positions [at_first, at_end), N a step. `MASKED`: some rows don't see all of a step; only [begin, end) is read."""
    d, position = tl.arange(0, D_PADDED), first_position + tl.arange(0, M)
    for at in tl.range(at_first, at_end, N, num_stages=STAGES):
        n = at + tl.arange(0, N)
        if MASKED:
            known = (n >= begin) & (n < end)
            block = tl.load(table + n // B, mask=known, other=0)
        else:
            block = tl.load(table + n // B)
        place = block.to(tl.int64) * kv_block + n % B * kv_slot
        where = head_kv + place[:, None] + place_of(d, CODES)[None, :]
        if MASKED:
            inside = known[:, None] & (d < D)[None, :]
            k = tl.load(where, mask=inside, other=0)
        elif D < D_PADDED:
            k = tl.load(where, mask=(d < D)[None, :], other=0)
        else:
            k = tl.load(where)
        k = widened(k, q.dtype, CODES, d[None, :])
        scores = tl.dot(q, k.T, input_precision="ieee")
        if CODES == INT4:
            scale_at = head_scales + block.to(tl.int64) * scale_block + n % B * HKV
            if MASKED:
                key_scales = tl.load(scale_at, mask=known, other=0)
                value_scales = tl.load(scale_at + scale_plane, mask=known, other=0)
            else:
                key_scales, value_scales = tl.load(scale_at), tl.load(scale_at + scale_plane)
            whole = tl.sum(q.to(tl.float32), axis=1)
            scores = scores * step_of(key_scales)[None, :] + whole[:, None] * zero_of(key_scales)[None, :]
        if CODES == INT8:
            scale_at = head_scales + block.to(tl.int64) * scale_block + n % B * HKV
            if MASKED:
                scores *= tl.load(scale_at, mask=known, other=0.0)[None, :]
            else:
                scores *= tl.load(scale_at)[None, :]
        if SOFTCAP > 0:  # the result is in units of `scale_log2`
            scores = softcapped(scores * scale_log2, SOFTCAP) / scale_log2
        if MASKED:
            seen = n[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & (n[None, :] >= first_seen(position, window, CHUNKED)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
        safe_top = new_top
        if MASKED and HAS_WINDOW:  # a row may have seen nothing so far
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * scale_log2 - safe_top[:, None])
        decay = tl.exp2(top - safe_top)
        if MASKED:
            v = tl.load(where + kv_plane, mask=inside, other=0)
        elif D < D_PADDED:
            v = tl.load(where + kv_plane, mask=(d < D)[None, :], other=0)
        else:
            v = tl.load(where + kv_plane)
        v = widened(v, q.dtype, CODES, d[None, :])
        total = total * decay + tl.sum(weights, axis=1)
        sums *= decay[:, None]
        if CODES == INT4:
            sums += tl.sum(weights * zero_of(value_scales)[None, :], axis=1)[:, None]
            weights *= step_of(value_scales)[None, :]
        if CODES == INT8:
            if MASKED:
                weights *= tl.load(scale_at + scale_plane, mask=known, other=0.0)[None, :]
            else:
                weights *= tl.load(scale_at + scale_plane)[None, :]
        sums = tl.dot(weights.to(v.dtype), v, sums, input_precision="ieee")
        top = new_top
    return sums, top, total


_PREFILL = Kernel(_prefill)
