"""Paged decode attention, as in `triton_decode_codes`, over int4 keys and values.

Four codes of a token are loaded as 16 bits, so each product is four: of a head's every fourth place. A number is its code times
the token's scale plus the zero point, which joins the scores with the sum of a query, and the outputs with that of the weights.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.attention.triton_scores import LEAST, item_rows, softcapped, write_sums
from engine.kernels.codes.triton_codes import of_fours, step_of, zero_of
from engine.kernels.launch import Kernel


@triton.jit(do_not_specialize_on_alignment=["scales"])
def _decode_int4(
    q_SHD, fours, factors_2, scales, items_I8, tables, out_SHD, partial_IQHD, stats_IQH2, sinks_H, scale_log2,
    kv_block, kv_plane, scale_block, scale_plane,
    HQ: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    D_PADDED: tl.constexpr, B: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """`fours`, `kv_block` and `kv_plane` are in 16-bit units. `factors_2` and CODES: as other kernels have them."""
    kv_at, item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    QUARTER: tl.constexpr = D // 4
    DTYPE: tl.constexpr = q_SHD.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.load(items_I8 + item * 8)
    if sequence >= 0:
        start, end = tl.load(items_I8 + item * 8 + 1), tl.load(items_I8 + item * 8 + 2)
        alone = tl.load(items_I8 + item * 8 + 3)
        query, head, mine, row_end = item_rows(items_I8, item, kv_at, Q, G, ROWS)
        four = tl.arange(0, D_PADDED // 4)
        in_q = mine[:, None] & (four < QUARTER)[None, :]
        q_at = q_SHD + ((sequence + query).to(tl.int64) * HQ + head)[:, None] * D + 4 * four[None, :]
        q_0, q_1 = tl.load(q_at, mask=in_q, other=0.0), tl.load(q_at + 1, mask=in_q, other=0.0)
        q_2, q_3 = tl.load(q_at + 2, mask=in_q, other=0.0), tl.load(q_at + 3, mask=in_q, other=0.0)
        whole = (q_0.to(tl.float32) + q_1.to(tl.float32)) + (q_2.to(tl.float32) + q_3.to(tl.float32))
        whole = tl.sum(whole, axis=1) * scale_log2
        table = tables + tl.load(items_I8 + item * 8 + 4)
        kv_head = fours + kv_at * QUARTER + four[None, :]

        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, KEYS), tl.float32)
        zeros = tl.zeros((ROWS, KEYS), tl.float32)  # zero points of the values, weighted
        sums_0 = tl.zeros((ROWS, D_PADDED // 4), tl.float32)
        sums_1 = tl.zeros((ROWS, D_PADDED // 4), tl.float32)
        sums_2 = tl.zeros((ROWS, D_PADDED // 4), tl.float32)
        sums_3 = tl.zeros((ROWS, D_PADDED // 4), tl.float32)
        for key_start in tl.range(start, end, KEYS, num_stages=STAGES):
            at = key_start + tl.arange(0, KEYS)
            known = (at < end)[None, :]
            if Q > 1:
                known = known & (at[None, :] < row_end[:, None])
            # Positions past `end` reload the last one: fewer instructions than a mask.
            at = tl.minimum(at, end - 1)
            block = tl.load(table + at // B).to(tl.int64)
            where = (block * kv_block + (at % B) * (HKV * QUARTER))[:, None]
            if D == D_PADDED:
                keys, values = tl.load(kv_head + where), tl.load(kv_head + kv_plane + where)
            else:
                inside = (four < QUARTER)[None, :]
                keys = tl.load(kv_head + where, mask=inside, other=0)
                values = tl.load(kv_head + kv_plane + where, mask=inside, other=0)
            scale_at = scales + block * scale_block + (at % B) * HKV + kv_at
            of_key, of_value = tl.load(scale_at), tl.load(scale_at + scale_plane)
            keys = tl.trans(keys)
            scores = tl.dot(q_0, of_fours(keys, 0, DTYPE, PLAIN))
            scores = tl.dot(q_1, of_fours(keys, 1, DTYPE, PLAIN), scores)
            scores = tl.dot(q_2, of_fours(keys, 2, DTYPE, PLAIN), scores)
            scores = tl.dot(q_3, of_fours(keys, 3, DTYPE, PLAIN), scores)
            scores = scores * (step_of(of_key) * scale_log2)[None, :] + whole[:, None] * zero_of(of_key)[None, :]
            if SOFTCAP > 0:
                scores = softcapped(scores, SOFTCAP)
            scores = tl.where(known, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            if Q > 1:
                new_top = tl.maximum(new_top, LEAST)
            weights = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)[:, None]
            total = total * decay + weights
            zeros = zeros * decay + weights * zero_of(of_value)[None, :]
            weights = (weights * step_of(of_value)[None, :]).to(DTYPE)
            sums_0 = tl.dot(weights, of_fours(values, 0, DTYPE, PLAIN), sums_0 * decay)
            sums_1 = tl.dot(weights, of_fours(values, 1, DTYPE, PLAIN), sums_1 * decay)
            sums_2 = tl.dot(weights, of_fours(values, 2, DTYPE, PLAIN), sums_2 * decay)
            sums_3 = tl.dot(weights, of_fours(values, 3, DTYPE, PLAIN), sums_3 * decay)
            top = new_top
        sums = tl.interleave(tl.interleave(sums_0, sums_2), tl.interleave(sums_1, sums_3))
        sums += tl.sum(zeros, axis=1)[:, None]
        d = tl.arange(0, D_PADDED)
        write_sums(
            sums, tl.sum(total, axis=1), top, query, head, mine, d, alone, sequence, item, out_SHD, partial_IQHD, stats_IQH2,
            sinks_H, Q, HQ, D, HAS_SINKS,
        )  # fmt: skip


DECODE_INT4 = Kernel(_decode_int4)
