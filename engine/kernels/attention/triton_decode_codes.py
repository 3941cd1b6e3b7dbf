# ruff: noqa: SIM300 - Triton compares a compile-time value with what stands on its right
"""Paged decode attention, as in `triton_decode`, over an 8-bit quantised KV cache.

Two codes of a token are loaded as 16 bits. That is what shared memory can hand out as the tensor core's operand, transposed or
not: of each pair first the first codes, then the second ones. So each product is two, of a head's even and of its odd places.

An e4m3's bits are a float16 2^8 times too small. Queries and weights are float16, too, so those in bfloat16 are multiplied with a
power of two. So are weights. Codes of int8 are numbers of the query's type.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.attention.triton_scores import LEAST, item_rows, softcapped, write_sums
from engine.kernels.codes.triton_codes import INT8, PAIR_TIMES, PAIR_TIMES_TOLD, of_pairs
from engine.kernels.launch import Kernel


@triton.jit
def for_float16(even, odd):
    """Each row times a power of two such that its largest magnitude is in [2^14, 2^15]; and the inverse.

    A bfloat16 keeps its bits unless it is less than 2^-31 of the largest.
    """
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15), 254)
    times = ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    return (
        (even * times).to(tl.float16),
        (odd * times).to(tl.float16),
        ((exponent - 14) << 23).to(tl.float32, bitcast=True),
    )


@triton.jit(do_not_specialize_on_alignment=["scales"])
def _decode_codes(
    q_SHD, pairs, factors_2, scales, items_I8, tables, out_SHD, partial_IQHD, stats_IQH2, sinks_H, scale_log2,
    kv_block, kv_plane, scale_block, scale_plane,
    HQ: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    D_PADDED: tl.constexpr, B: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """`pairs`, `kv_block` and `kv_plane` are in 16-bit units."""
    kv_at, item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = D // 2
    GIVEN: tl.constexpr = q_SHD.dtype.element_ty
    DTYPE: tl.constexpr = GIVEN if CODES == INT8 else tl.float16
    # Weights are up to 2^15, so that float16 keeps all bits of those down to 2^-29 of the largest.
    RAISED: tl.constexpr = 0.0 if CODES == INT8 else 15.0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.load(items_I8 + item * 8)
    if sequence >= 0:
        start, end = tl.load(items_I8 + item * 8 + 1), tl.load(items_I8 + item * 8 + 2)
        alone = tl.load(items_I8 + item * 8 + 3)
        query, head, mine, row_end = item_rows(items_I8, item, kv_at, Q, G, ROWS)
        pair = tl.arange(0, D_PADDED // 2)
        in_q = mine[:, None] & (pair < HALF)[None, :]
        q_at = q_SHD + ((sequence + query).to(tl.int64) * HQ + head)[:, None] * D + 2 * pair[None, :]
        q_even, q_odd = tl.load(q_at, mask=in_q, other=0.0), tl.load(q_at + 1, mask=in_q, other=0.0)
        times = tl.full((ROWS,), 1.0, tl.float32)
        if CODES != INT8:
            scale_log2 *= tl.load(factors_2) / PAIR_TIMES
            if GIVEN == tl.bfloat16:
                q_even, q_odd, times = for_float16(q_even, q_odd)
        times *= scale_log2
        table = tables + tl.load(items_I8 + item * 8 + 4)
        kv_head = pairs + kv_at * HALF + pair[None, :]

        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, KEYS), tl.float32)
        sums_even = tl.zeros((ROWS, D_PADDED // 2), tl.float32)
        sums_odd = tl.zeros((ROWS, D_PADDED // 2), tl.float32)
        for key_start in tl.range(start, end, KEYS, num_stages=STAGES):
            at = key_start + tl.arange(0, KEYS)
            known = (at < end)[None, :]
            if Q > 1:
                known = known & (at[None, :] < row_end[:, None])
            # Positions past `end` reload the last one: fewer instructions than a mask.
            at = tl.minimum(at, end - 1)
            block = tl.load(table + at // B).to(tl.int64)
            where = (block * kv_block + (at % B) * (HKV * HALF))[:, None]
            if D == D_PADDED:
                keys, values = tl.load(kv_head + where), tl.load(kv_head + kv_plane + where)
            else:
                inside = (pair < HALF)[None, :]
                keys = tl.load(kv_head + where, mask=inside, other=0)
                values = tl.load(kv_head + kv_plane + where, mask=inside, other=0)
            keys = tl.trans(keys)
            scores = tl.dot(q_even, of_pairs(keys, False, False, DTYPE, CODES, PLAIN))
            scores = tl.dot(q_odd, of_pairs(keys, True, False, DTYPE, CODES, PLAIN), scores) * times[:, None]
            if CODES == INT8:
                scale_at = scales + block * scale_block + (at % B) * HKV + kv_at
                scores *= tl.load(scale_at)[None, :]
            if SOFTCAP > 0:
                scores = softcapped(scores, SOFTCAP)
            scores = tl.where(known, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1) - RAISED)
            if Q > 1:
                new_top = tl.maximum(new_top, LEAST)
            weights = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay[:, None] + weights
            if CODES == INT8:
                weights *= tl.load(scale_at + scale_plane)[None, :]
            weights = weights.to(DTYPE)
            sums_even = tl.dot(weights, of_pairs(values, False, True, DTYPE, CODES, PLAIN), sums_even * decay[:, None])
            sums_odd = tl.dot(weights, of_pairs(values, True, True, DTYPE, CODES, PLAIN), sums_odd * decay[:, None])
            top = new_top
        total = tl.sum(total, axis=1)
        sums = tl.interleave(sums_even, sums_odd)
        if CODES != INT8:
            sums *= tl.load(factors_2 + 1) / PAIR_TIMES_TOLD

        d = tl.arange(0, D_PADDED)
        write_sums(
            sums, total, top, query, head, mine, d, alone, sequence, item, out_SHD, partial_IQHD, stats_IQH2, sinks_H,
            Q, HQ, D, HAS_SINKS,
        )  # fmt: skip


DECODE_CODES = Kernel(_decode_codes)
