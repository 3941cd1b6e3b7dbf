"""Triton version of `attention.sparse_attention`: a program for a token and some of its heads, which share the selection.

T tokens, Hq query heads, C size of the latents, R size of the rotated part, B block size, K positions at most. Few tokens'
positions are cut into parts, so that all processors have work.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention import AttentionPlan
from engine.kernels.codes.triton_codes import FP8
from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.mla import Latents
from engine.kernels.mla.forms import ROWS
from engine.kernels.mla.triton_absorbed import STEP, attend_to, combine, launch

FEWEST_STEPS = 4  # loop steps of a part


def sparse_attention(
    q: torch.Tensor, kept: Latents, plan: AttentionPlan, selected: torch.Tensor, *, rank: int, scale: float
) -> torch.Tensor:
    num_heads, decoding = q.shape[1], plan.num_decode
    out = torch.empty((q.shape[0], num_heads, rank), dtype=q.dtype, device=q.device)
    heads = max(16, min(ROWS, triton.next_power_of_2(num_heads)))
    if decoding:
        programs = decoding * triton.cdiv(num_heads, heads)
        most_parts = max(1, selected.shape[1] // (FEWEST_STEPS * STEP))
        parts = max(1, min(most_parts, describe(q.device).processors // programs))
        sums = out
        stats = torch.empty((decoding * parts, num_heads, 2), dtype=torch.float32, device=q.device)
        if parts > 1:
            sums = torch.empty((decoding * parts, num_heads, rank), dtype=torch.float32, device=q.device)
        items = plan.items[0]
        launch(
            _ATTEND, decoding * parts, q, kept, rank, scale,
            selected, items.items, items.parts, plan.tables, 0, sums, stats, parts, 0,
            K=selected.shape[1], HEADS=heads, DECODE=True, WHOLE=parts == 1,
        )  # fmt: skip
        if parts > 1:
            combine(sums, stats, items.parts, out, each=parts)
    if plan.prefill is not None:
        prompts, table, tiles = slice(decoding, None), plan.prefill.batch.block_table, plan.prefill.tiles
        launch(
            _ATTEND, len(tiles) * plan.prefill.rows, q[prompts], kept, rank, scale,
            selected[prompts], tiles, tiles, table, table.stride(0), out[prompts], out, 1, plan.prefill.rows,
            K=selected.shape[1], HEADS=heads, DECODE=False, WHOLE=True,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_row", "parts", "rows"])
def _attend(
    q_THD, kv, rotated_keys, factors_2, scales, scale_log2, kv_block, kv_slot, rotated_block, rotated_slot, scale_block,
    selected_TK, items_I8, items_of_S2, tables, table_row, out_THC, stats_TH2, parts, rows,
    HQ: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, CODES: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr,
    DECODE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`rows`: queries of a prompt's tile. DECODE: items are those of sequences, each in `parts` parts; WHOLE: in one."""
    SHARES: tl.constexpr = (HQ + HEADS - 1) // HEADS
    share, index = tl.program_id(0) % SHARES, tl.program_id(0) // SHARES
    part, index = index % parts, index // parts
    if DECODE:
        row, first, count = index, tl.load(items_of_S2 + index * 2), tl.load(items_of_S2 + index * 2 + 1)
        if count == 0:  # an unused slot of a captured graph
            return
        seen = tl.load(items_I8 + (first + count - 1) * 8 + 2)
        table = tables + tl.load(items_I8 + first * 8 + 4)
    else:
        item, query = items_I8 + index // rows * 8, index % rows
        if query >= tl.load(item + 1):
            return
        row, seen = tl.load(item) + query, tl.load(item + 2) + query + 1
        table = tables + tl.load(item + 4).to(tl.int64) * table_row
    head, c, r = share * HEADS + tl.arange(0, HEADS), tl.arange(0, C_PADDED), tl.arange(0, R_PADDED)
    there, token = head < HQ, row.to(tl.int64)
    q_at = q_THD + ((token * HQ + head) * (C + R))[:, None]
    q_latent = tl.load(q_at + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0)
    q_rotated = tl.load(q_at + C + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0)

    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, C_PADDED), tl.float32)
    factor = 1.0
    if CODES >= FP8:
        factor = tl.load(factors_2)
    seen = tl.minimum(seen, K)
    each = tl.cdiv(tl.cdiv(K, parts), N) * N
    begin, end = part * each, tl.minimum(part * each + each, seen)
    for at in tl.range(begin, end, N, num_stages=STAGES):
        listed = at + tl.arange(0, N)
        known = listed < end
        n = tl.load(selected_TK + token * K + listed, mask=known, other=0)
        sums, top, total = attend_to(
            q_latent, q_rotated, kv, rotated_keys, scales, table, n, known, known[None, :], factor, scale_log2,
            kv_block, kv_slot, rotated_block, rotated_slot, scale_block, sums, top, total, C, C_PADDED, R, R_PADDED, B, CODES,
        )  # fmt: skip
    if CODES >= FP8:
        sums *= factor

    mask = there[:, None] & (c < C)[None, :]
    if WHOLE:
        target = out_THC + ((token * HQ + head) * C)[:, None] + c[None, :]
        tl.store(target, (sums / total[:, None]).to(out_THC.dtype.element_ty), mask=mask)
    else:
        base = (token * parts + part) * HQ + head
        tl.store(out_THC + base[:, None] * C + c[None, :], sums, mask=mask)
        tl.store(stats_TH2 + base * 2, top, mask=there)
        tl.store(stats_TH2 + base * 2 + 1, total, mask=there)


_ATTEND = Kernel(_attend)
