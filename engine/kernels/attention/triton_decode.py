"""Paged attention of single queries, split over the context: the KV is streamed once, at memory speed.

S sequences, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size, B block size, I work items. An item is a run of
one sequence's positions (`split.deal_out`), so work is even for any lengths. A program streams one item of one key head
for all G queries of the group, which share the tensor core's rows, with an online softmax (Milakov and Gimelshein, 2018). Up to
Q rows of a sequence that verify drafts fill the rows that are left, so its KV is read once for all. A sequence of one item is
written at once; other items' parts go through `_combine` (flash decoding: Dao, Haziza, Massa and Sizov, 2023).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.attention.plan import DecodeItems, Scores
from engine.kernels.attention.split import STEP_POSITIONS, TILE_ROWS
from engine.kernels.attention.triton_decode_codes import DECODE_CODES
from engine.kernels.attention.triton_decode_int4 import DECODE_INT4
from engine.kernels.attention.triton_scores import LEAST, LOG2_E, item_rows, softcapped, write_sums
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
from engine.kernels.device import describe
from engine.kernels.launch import Kernel

# Measured on an H200 with head size 128 in bfloat16, with a loop step of STEP_POSITIONS.
WARPS = 2
# Padded head sizes, unquantised and quantised, up to which a program of two warps does not spill.
MOST_WITH_FEW_WARPS = 256, 128
# Positions of a loop step, stages and warps for a quantised KV cache, measured likewise. A processor gets as many programs as
# fit, so few programs each use more of it.
SPREAD, SPREAD_PROGRAMS, PACKED = (128, 7, 4), 2, (64, 5, 2)
FEWEST_PLACES = 32  # with fewer loaded of a head, four warps spill
MAX_KEY_BYTES = 256  # longer keys halve the positions of a loop step


def paged_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    work: DecodeItems,
    tables: torch.Tensor,
    out: torch.Tensor,
    how: Scores,
    codes: Codes | None = None,
) -> None:
    """Write the leading S rows of `out` [T, Hq, D]."""
    items, parts, queries = work.items, work.parts, work.queries
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = kv_layer.shape[2:4]
    padded = max(16, triton.next_power_of_2(head_dim))
    group = num_heads // num_kv_heads
    partial = torch.empty((items.shape[0], queries, num_heads, head_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((items.shape[0], queries, num_heads, 2), dtype=torch.float32, device=q.device)
    device = describe(q.device)
    num_programs, pdl = parts.shape[0] * num_kv_heads, device.has_tma
    step = STEP_POSITIONS if padded * q.element_size() <= MAX_KEY_BYTES else STEP_POSITIONS // 2
    stages = _stages(num_programs, device.processors)
    warps = WARPS if padded <= MOST_WITH_FEW_WARPS[codes is not None] else 2 * WARPS
    kernel, pool, own = _DECODE, bytes_of(kv_layer, codes), ()
    if codes is not None and q.element_size() == 2:
        kernel, places = (DECODE_INT4, 4) if codes.kind == "int4" else (DECODE_CODES, 2)
        pool, own = kv_layer.view(torch.int16), (triton.knobs.runtime.interpret,)
        padded = max(places * 16, padded)
        if padded <= MOST_WITH_FEW_WARPS[1]:
            few = num_programs <= SPREAD_PROGRAMS * device.processors and padded // places >= FEWEST_PLACES
            step, stages, warps = SPREAD if few else PACKED
    kv_block, kv_plane = pool.stride()[:2]
    factors, scales, scale_block, scale_plane = scales_of(codes)
    fixed = (
        num_heads, num_kv_heads, group, queries, max(TILE_ROWS, triton.next_power_of_2(group)), head_dim, padded,
        block_size, step, stages, how.softcap, how.sinks is not None, kind_of(codes, q.device), pdl, *own,
    )  # fmt: skip
    kernel.launch(
        (num_kv_heads, items.shape[0]), (q.dtype, kv_block, kv_plane, scale_block, scale_plane, *fixed),
        q, pool, factors, scales, items, tables, out, partial, stats, how.sinks, how.scale * LOG2_E,
        kv_block, kv_plane, scale_block, scale_plane, *fixed,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    # One head a program while that fills the GPU: empty programs cost time.
    heads = 1 if parts.shape[0] <= 32 else min(8, num_heads & -num_heads)
    _COMBINE.launch(
        (parts.shape[0], num_heads // heads),
        (out.dtype, queries, num_heads, heads, head_dim, padded, how.sinks is not None, pdl),
        partial, stats, parts, out, how.sinks, queries, num_heads, heads, head_dim, padded, how.sinks is not None, pdl,
        num_warps=1 if heads == 1 else 4, launch_pdl=pdl,
    )  # fmt: skip


def _stages(num_programs: int, processors: int) -> int:
    """Pipeline stages: seven hide more latency with two programs a processor; five allow three. Take what fills waves better.

    With more waves five stages are ahead within a model, though not for the kernel alone.
    """

    def filled(at_once: int) -> float:
        return num_programs / (-(-num_programs // at_once) * at_once)

    return 7 if num_programs <= 4 * processors and filled(2 * processors) > filled(3 * processors) else 5


@triton.jit(do_not_specialize_on_alignment=["scales"])
def _decode(
    q_SHD, kv, factors_2, scales, items_I8, tables, out_SHD, partial_IQHD, stats_IQH2, sinks_H, scale_log2,
    kv_block, kv_plane, scale_block, scale_plane,
    HQ: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    D_PADDED: tl.constexpr, B: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_at, item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.load(items_I8 + item * 8)
    if sequence >= 0:
        start, end = tl.load(items_I8 + item * 8 + 1), tl.load(items_I8 + item * 8 + 2)
        alone = tl.load(items_I8 + item * 8 + 3)
        query, head, mine, row_end = item_rows(items_I8, item, kv_at, Q, G, ROWS)
        d = tl.arange(0, D_PADDED)
        q_at = q_SHD + ((sequence + query).to(tl.int64) * HQ + head)[:, None] * D + d[None, :]
        q = tl.load(q_at, mask=mine[:, None] & (d < D)[None, :], other=0.0)
        table = tables + tl.load(items_I8 + item * 8 + 4)
        kv_head = kv + kv_at * place_of(D, CODES) + place_of(d, CODES)[None, :]
        whole = tl.sum(q.to(tl.float32), axis=1)

        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, D_PADDED), tl.float32)
        if CODES >= FP8:
            scale_log2 *= tl.load(factors_2)
        for key_start in tl.range(start, end, KEYS, num_stages=STAGES):
            at = key_start + tl.arange(0, KEYS)
            known = at < end
            block = tl.load(table + at // B, mask=known, other=0).to(tl.int64)
            where = (block * kv_block + (at % B) * (HKV * place_of(D, CODES)))[:, None]
            inside = known[:, None] & (d < D)[None, :]
            keys = widened(tl.load(kv_head + where, mask=inside, other=0), q.dtype, CODES, d[None, :])
            values = widened(tl.load(kv_head + kv_plane + where, mask=inside, other=0), q.dtype, CODES, d[None, :])
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
            if CODES == INT4:
                scale_at = scales + block * scale_block + (at % B) * HKV + kv_at
                key_scales = tl.load(scale_at, mask=known, other=0)
                value_scales = tl.load(scale_at + scale_plane, mask=known, other=0)
                scores = scores * step_of(key_scales)[None, :] + whole[:, None] * zero_of(key_scales)[None, :]
            scores *= scale_log2
            if CODES == INT8:
                scale_at = scales + block * scale_block + (at % B) * HKV + kv_at
                scores *= tl.load(scale_at, mask=known, other=0.0)[None, :]
            if SOFTCAP > 0:
                scores = softcapped(scores, SOFTCAP)
            if Q > 1:
                scores = tl.where(known[None, :] & (at[None, :] < row_end[:, None]), scores, float("-inf"))
                new_top = tl.maximum(tl.maximum(top, tl.max(scores, axis=1)), LEAST)
            else:
                scores = tl.where(known[None, :], scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.sum(weights, axis=1)
            sums *= decay[:, None]
            if CODES == INT4:
                sums += tl.sum(weights * zero_of(value_scales)[None, :], axis=1)[:, None]
                weights *= step_of(value_scales)[None, :]
            if CODES == INT8:
                weights *= tl.load(scale_at + scale_plane, mask=known, other=0.0)[None, :]
            sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
            top = new_top
        if CODES >= FP8:
            sums *= tl.load(factors_2 + 1)

        write_sums(
            sums, total, top, query, head, mine, d, alone, sequence, item, out_SHD, partial_IQHD, stats_IQH2, sinks_H,
            Q, HQ, D, HAS_SINKS,
        )  # fmt: skip


@triton.jit
def _combine(
    partial_IQHD, stats_IQH2, parts_S2, out_SHD, sinks_H,
    Q: tl.constexpr, HQ: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count = tl.load(parts_S2 + sequence * 2), tl.load(parts_S2 + sequence * 2 + 1)
    if count > 1:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, D_PADDED)[None, :]
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, D_PADDED), tl.float32)
        for part in range(count):
            base = (first + part * Q).to(tl.int64) * HQ + head
            part_top, part_total = tl.load(stats_IQH2 + base * 2), tl.load(stats_IQH2 + base * 2 + 1)
            new_top = tl.maximum(top, part_top)
            old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
            values = tl.load(partial_IQHD + base[:, None] * D + d, mask=d < D, other=0.0)
            sums = sums * old[:, None] + values * new[:, None]
            total = total * old + part_total * new
            top = new_top
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks_H + head) * 1.4426950408889634 - top)
        out = out_SHD + (sequence * HQ + head)[:, None] * D + d
        tl.store(out, (sums / total[:, None]).to(out_SHD.dtype.element_ty), mask=d < D)


_DECODE, _COMBINE = Kernel(_decode), Kernel(_combine)
