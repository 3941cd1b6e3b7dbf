# ruff: noqa: SIM102 - Triton decides an outer `if` of constants at compile time, an `and` with one at run time
"""Triton version of `absorbed.mla_attention`: the heads of a token share the tensor core's rows, since they share all keys.

T tokens, S sequences that decode, Hq query heads, C size of the latents, R size of the rotated part, B block size. A decoding
sequence's context is cut into items as in `attention.triton_decode`; prompts are cut into tiles of queries. A loop step's
latents are read once, for the scores and for the sums.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention import AttentionPlan
from engine.kernels.codes.triton_codes import FP8, INT8, bytes_of, kind_of, scales_of, widened
from engine.kernels.launch import Kernel
from engine.kernels.mla.absorbed import Latents
from engine.kernels.mla.forms import ROWS

STEP, STAGES, WARPS = 32, 2, 8
LOG2_E = 1.4426950408889634


def mla_attention(q: torch.Tensor, kept: Latents, plan: AttentionPlan, *, rank: int, scale: float) -> torch.Tensor:
    num_heads = q.shape[1]
    out = torch.empty((q.shape[0], num_heads, rank), dtype=q.dtype, device=q.device)
    heads = min(ROWS, triton.next_power_of_2(num_heads))
    if plan.num_decode:
        items = plan.items[0]
        rows = max(16, heads)
        partial = torch.empty((items.items.shape[0], num_heads, rank), dtype=torch.float32, device=q.device)
        stats = torch.empty((items.items.shape[0], num_heads, 2), dtype=torch.float32, device=q.device)
        launch(
            _LATENT, len(items.items), q, kept, rank, scale, items.items, plan.tables, 0, out, partial, stats,
            HEADS=rows, QUERIES=1, PIECES=1, DECODE=True,
        )  # fmt: skip
        combine(partial, stats, items.parts, out)
    if plan.prefill is not None:
        prompts, queries = slice(plan.num_decode, None), max(1, ROWS // heads)
        tiles, table, none = plan.prefill.tiles, plan.prefill.batch.block_table, out
        pieces = triton.cdiv(plan.prefill.rows, queries)
        launch(
            _LATENT, len(tiles) * pieces, q[prompts], kept, rank, scale, tiles, table, table.stride(0), out[prompts], none, none,
            HEADS=heads, QUERIES=queries, PIECES=pieces, DECODE=False,
        )  # fmt: skip
    return out


def launch(
    kernel: Kernel,
    programs: int,
    q: torch.Tensor,
    kept: Latents,
    rank: int,
    scale: float,
    *own: torch.Tensor | int,
    HEADS: int,
    **constants: int,
) -> None:
    """Launch a kernel that calls `attend_to`, `programs` for each HEADS heads. `own` follow the common arguments."""
    num_heads, size = q.shape[1], q.shape[2] - rank
    latents, rotated = kept.latents, kept.rotated
    factors, scales, scale_block, _ = scales_of(kept.codes)
    kernel.launch(
        (triton.cdiv(num_heads, HEADS) * programs,), None,
        q, bytes_of(latents, kept.codes), rotated, factors, scales, scale * LOG2_E,
        latents.stride(0), latents.stride(2), rotated.stride(0), rotated.stride(2), scale_block, *own,
        HQ=num_heads, C=rank, C_PADDED=max(16, triton.next_power_of_2(rank)), R=size,
        R_PADDED=max(16, triton.next_power_of_2(size)), B=rotated.shape[2], N=STEP, STAGES=STAGES,
        CODES=kind_of(kept.codes, q.device), HEADS=HEADS, num_warps=WARPS, num_stages=STAGES, **constants,
    )  # fmt: skip


def combine(
    partial: torch.Tensor, stats: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, *, each: int = 0
) -> None:
    """Combine the items of each sequence into `out`; `each`: items of any sequence, 0: as in `parts`."""
    _, num_heads, rank = partial.shape
    _COMBINE.launch(
        (parts.shape[0], num_heads), None, partial, stats, parts, out, each,
        HQ=num_heads, C=rank, C_PADDED=triton.next_power_of_2(rank), EVEN=each > 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row"])
def _latent(
    q_THD, kv, rotated_keys, factors_2, scales, scale_log2, kv_block, kv_slot, rotated_block, rotated_slot, scale_block,
    items_I8, tables, table_row, out_THC, partial_IHC, stats_IH2,
    HQ: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, CODES: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    PIECES: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Rows are the heads of a query, then those of the next one. Only a grid's first axis is large enough for long prompts."""
    SHARES: tl.constexpr = (HQ + HEADS - 1) // HEADS
    share, index = tl.program_id(0) % SHARES, tl.program_id(0) // SHARES
    row = tl.arange(0, HEADS * QUERIES)
    head, query = share * HEADS + row % HEADS, row // HEADS
    item = items_I8 + index // PIECES * 8
    if DECODE:
        first_row, num_queries = tl.load(item), 1
        if first_row < 0:
            return
        begin, end = tl.load(item + 1), tl.load(item + 2)
        position = end - 1 + query
        table = tables + tl.load(item + 4)
    else:
        skipped = index % PIECES * QUERIES
        num_queries = tl.minimum(QUERIES, tl.load(item + 1) - skipped)
        if num_queries <= 0:
            return
        first_row, first_position = tl.load(item) + skipped, tl.load(item + 2) + skipped
        begin, end = 0, first_position + num_queries
        position = first_position + query
        table = tables + tl.load(item + 4).to(tl.int64) * table_row
    c, r = tl.arange(0, C_PADDED), tl.arange(0, R_PADDED)
    there = (head < HQ) & (query < num_queries)
    token = (first_row + query).to(tl.int64)
    q_at = q_THD + ((token * HQ + head) * (C + R))[:, None]
    q_latent = tl.load(q_at + c[None, :], mask=there[:, None] & (c < C)[None, :], other=0.0)
    q_rotated = tl.load(q_at + C + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0)

    top = tl.full((HEADS * QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS * QUERIES,), tl.float32)
    sums = tl.zeros((HEADS * QUERIES, C_PADDED), tl.float32)
    factor = 1.0
    if CODES >= FP8:
        factor = tl.load(factors_2)
    for at in tl.range(begin, end, N, num_stages=STAGES):
        n = at + tl.arange(0, N)
        known = n < end
        seen = known[None, :] & (n[None, :] <= position[:, None])
        sums, top, total = attend_to(
            q_latent, q_rotated, kv, rotated_keys, scales, table, n, known, seen, factor, scale_log2,
            kv_block, kv_slot, rotated_block, rotated_slot, scale_block, sums, top, total, C, C_PADDED, R, R_PADDED, B, CODES,
        )  # fmt: skip
    if CODES >= FP8:
        sums *= factor

    mask = there[:, None] & (c < C)[None, :]
    if DECODE:
        if tl.load(item + 3) == 0:
            base = index.to(tl.int64) * HQ + head
            tl.store(partial_IHC + base[:, None] * C + c[None, :], sums, mask=mask)
            tl.store(stats_IH2 + base * 2, top, mask=there)
            tl.store(stats_IH2 + base * 2 + 1, total, mask=there)
            return
    target = out_THC + ((token * HQ + head) * C)[:, None] + c[None, :]
    tl.store(target, (sums / total[:, None]).to(out_THC.dtype.element_ty), mask=mask)


@triton.jit
def attend_to(
    q_latent, q_rotated, kv, rotated_keys, scales, table, n, known, seen, factor, scale_log2,
    kv_block, kv_slot, rotated_block, rotated_slot, scale_block, sums, top, total,
    C: tl.constexpr, C_PADDED: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, B: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """One loop step: rows of queries attend to positions `n`, masked by `known` and `seen`."""
    c, r = tl.arange(0, C_PADDED), tl.arange(0, R_PADDED)
    block = tl.load(table + n // B, mask=known, other=0).to(tl.int64)
    where = kv + (block * kv_block + n % B * kv_slot)[:, None]
    kept = tl.load(where + c[None, :], mask=known[:, None] & (c < C)[None, :], other=0)
    latents = widened(kept, q_latent.dtype, CODES)
    rotated_at = rotated_keys + (block * rotated_block + n % B * rotated_slot)[:, None] + r[None, :]
    rotated = tl.load(rotated_at, mask=known[:, None] & (r < R)[None, :], other=0.0)
    scores = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
    if CODES == INT8:
        steps = tl.load(scales + block * scale_block + n % B, mask=known, other=0.0)
        scores *= steps[None, :]
    if CODES >= FP8:
        scores *= factor
    scores = tl.dot(q_rotated, tl.trans(rotated), scores, input_precision="ieee") * scale_log2
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, axis=1)
    if CODES == INT8:
        weights *= steps[None, :]
    sums = tl.dot(weights.to(latents.dtype), latents, sums * decay[:, None], input_precision="ieee")
    return sums, new_top, total


@triton.jit(do_not_specialize=["each"])
def _combine(
    partial_IHC, stats_IH2, parts_S2, out_SHC, each,
    HQ: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Combine the items of one sequence and head; EVEN: `each` so many, if any."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(parts_S2 + sequence * 2), tl.load(parts_S2 + sequence * 2 + 1)
    if EVEN:
        first, count = (sequence * each).to(tl.int32), tl.where(count > 0, each, 0)
    if count > 1:
        c = tl.arange(0, C_PADDED)
        top = tl.load(stats_IH2 + (first.to(tl.int64) * HQ + head) * 2)
        for part in range(1, count):
            top = tl.maximum(top, tl.load(stats_IH2 + ((first + part).to(tl.int64) * HQ + head) * 2))
        total = tl.sum(tl.zeros((C_PADDED,), tl.float32), axis=0)
        sums = tl.zeros((C_PADDED,), tl.float32)
        for part in range(count):
            base = (first + part).to(tl.int64) * HQ + head
            share = tl.exp2(tl.load(stats_IH2 + base * 2) - top)
            total += share * tl.load(stats_IH2 + base * 2 + 1)
            sums += share * tl.load(partial_IHC + base * C + c, mask=c < C, other=0.0)
        tl.store(out_SHC + (sequence * HQ + head) * C + c, (sums / total).to(out_SHC.dtype.element_ty), mask=c < C)


_LATENT, _COMBINE = Kernel(_latent), Kernel(_combine)
