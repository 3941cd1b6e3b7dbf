"""Triton version of `up_projected.up_projected_attention`: the latents of a context are up-projected piece by piece.

T tokens, H heads, C size of the latents, N and R plain and rotated features of a key, V features of a value, B block size,
P positions of a piece. A piece's latents are gathered from the pool, one GEMM up-projects them to [P, H (N + V)], and attention
reads that product in place, each head's keys beside its values. Rotated keys, which all heads share, are multiplied separately:
they are not copied to each head, and no key is padded from 192 to 256. A query whose context has several pieces keeps its
softmax state in memory between them, so nothing is merged afterwards.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.attention import PrefillPlan
from engine.kernels.codes.triton_codes import FP8, INT8, NUMBERS, bytes_of, kind_of, scales_of, widened
from engine.kernels.launch import Kernel
from engine.kernels.mla.absorbed import Latents
from engine.kernels.mla.forms import Forms

LOG2_E = 1.4426950408889634
GATHERED_ROWS = 16  # positions that a program copies of a block
# Queries of a program, positions of a loop step, warps, stages: by (largest value, bytes of an element). No loop spills.
SHAPES = {
    (128, 2): (128, 64, 8, 3),
    (256, 2): (128, 64, 8, 2),
    (256, 4): (16, 16, 8, 1),
}


def up_projected_attention(
    q: torch.Tensor, kept: Latents, plan: PrefillPlan, out_of_latents: torch.Tensor, forms: Forms, *, scale: float
) -> torch.Tensor:
    blocks, its, size = plan.blocks, forms.shape, kept.rotated.shape[2]
    assert blocks is not None, "contexts are gathered"
    rows = min(len(blocks) * size, forms.positions(size))
    work = q.new_empty((rows, its.made))
    out = q.new_empty((*q.shape[:2], its.value))
    left = len(q) if rows < len(blocks) * size else 0  # queries that continue in another piece
    sums = torch.empty((left, *out.shape[1:]), dtype=torch.float32, device=q.device)
    stats = torch.empty((2, left, q.shape[1]), dtype=torch.float32, device=q.device)
    for first in range(0, len(blocks), rows // size):
        latents, rotated = gather(kept, blocks[first : first + rows // size], q.dtype)
        made = torch.matmul(latents, out_of_latents.T, out=work[: len(latents)])
        _attend(q, made, rotated, plan, out, sums, stats, first * size, forms, scale)
    return out


def gather(kept: Latents, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents [I B, C] and the rotated keys [I B, R] of `blocks` [I, 2] int32: id, written positions. Others are 0."""
    rank, size, block_size = kept.latents.shape[-1], kept.rotated.shape[-1], kept.rotated.shape[2]
    latents, rotated = (
        torch.empty((len(blocks) * block_size, dim), dtype=dtype, device=blocks.device) for dim in (rank, size)
    )
    factors, scales, scale_block, _ = scales_of(kept.codes)
    rows = min(block_size, GATHERED_ROWS)
    _GATHER.launch(
        (len(blocks), triton.cdiv(block_size, rows)), None,
        bytes_of(kept.latents, kept.codes), kept.rotated, factors, scales, blocks, latents, rotated,
        kept.latents.stride(0), kept.latents.stride(2), kept.rotated.stride(0), kept.rotated.stride(2), scale_block,
        C=rank, C_PADDED=triton.next_power_of_2(rank), R=size, R_PADDED=triton.next_power_of_2(size), B=block_size,
        ROWS=rows, ROWS_PADDED=triton.next_power_of_2(rows), CODES=kind_of(kept.codes, blocks.device), num_warps=8,
    )  # fmt: skip
    return latents, rotated


def _attend(
    q: torch.Tensor,
    made: torch.Tensor,
    rotated: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    sums: torch.Tensor,
    stats: torch.Tensor,
    first: int,
    forms: Forms,
    scale: float,
) -> None:
    """Attend to a piece, whose first row is `first` of all gathered ones."""
    # Loaded 16 wide, values gave wrong answers on an H200, with 8 warps NaN. 32 wide they are right.
    its, padded = forms.shape, max(32, triton.next_power_of_2(forms.shape.value))
    shape = next(shape for (most, of), shape in SHAPES.items() if padded <= most and of == q.element_size())
    m, step, warps, stages = min(shape[0], plan.rows), *shape[1:]
    # Each has at least eight values.
    warps = min(warps, padded // 8)
    wide = max(16, triton.next_power_of_2(its.plain + 1) // 2)
    rest = 0 if its.plain <= wide else max(16, triton.next_power_of_2(its.plain - wide))

    def loaded(rows: torch.Tensor, columns: int) -> TensorDescriptor:
        return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [step, columns])

    rotated_padded = max(16, triton.next_power_of_2(its.rotated))
    _MADE.launch(
        (q.shape[1], plan.tiles.shape[0] * (plan.rows // m)), None,
        q, loaded(made, wide), loaded(made, rest or wide), loaded(rotated, rotated_padded), loaded(made, padded),
        plan.tiles, out, sums, stats, first, len(made), len(q), scale * LOG2_E,
        H=q.shape[1], N=its.plain, WIDE=wide, REST=rest, R=its.rotated, R_PADDED=rotated_padded, V=its.value, V_PADDED=padded,
        M=m, PIECES=plan.rows // m, STEP=step, STAGES=stages,
        num_warps=4 if m == 64 and padded <= 128 else warps, num_stages=stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks_I2"])
def _gather(
    kv, rotated_keys, factors_2, scales, blocks_I2, latents_PC, rotated_PR,
    kv_block, kv_slot, rotated_block, rotated_slot, scale_block,
    C: tl.constexpr, C_PADDED: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, B: tl.constexpr,
    ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    block, written = tl.load(blocks_I2 + item * 2).to(tl.int64), tl.load(blocks_I2 + item * 2 + 1)
    row, c, r = tl.arange(0, ROWS_PADDED), tl.arange(0, C_PADDED), tl.arange(0, R_PADDED)
    slot = tl.program_id(1) * ROWS + row
    inside, there = ((row < ROWS) & (slot < B))[:, None], ((row < ROWS) & (slot < written))[:, None]
    at = kv + block * kv_block + (slot * kv_slot)[:, None] + c[None, :]
    latents = tl.load(at, mask=there & (c < C)[None, :], other=0)
    if CODES != NUMBERS:
        wide = widened(latents, tl.float32, CODES)
        if CODES == INT8:
            wide *= tl.load(scales + block * scale_block + slot, mask=(row < ROWS) & (slot < written), other=0.0)[
                :, None
            ]
        if CODES >= FP8:
            wide *= tl.load(factors_2)
        latents = wide.to(latents_PC.dtype.element_ty)
    target = item * B + slot
    tl.store(latents_PC + (target * C)[:, None] + c[None, :], latents, mask=inside & (c < C)[None, :])
    at = rotated_keys + block * rotated_block + (slot * rotated_slot)[:, None] + r[None, :]
    keys = tl.load(at, mask=there & (r < R)[None, :], other=0.0)
    tl.store(rotated_PR + (target * R)[:, None] + r[None, :], keys, mask=inside & (r < R)[None, :])


@triton.jit(do_not_specialize=["first", "rows", "num_tokens"])
def _made(
    q_THD, wide_keys, more_keys, rotated_keys, values, tiles_I8, out_THV, sums_THV, stats_2TH, first, rows, num_tokens,
    scale_log2,
    H: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr,
    V: tl.constexpr, V_PADDED: tl.constexpr, M: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`first`: the piece's first row among the gathered ones; `rows`: its number of rows."""
    head, tile = tl.program_id(0), tiles_I8 + tl.program_id(1) // PIECES * 8
    skipped = tl.program_id(1) % PIECES * M
    num_rows = tl.minimum(M, tl.load(tile + 1) - skipped)
    first_row, first_position = tl.load(tile) + skipped, tl.load(tile + 2) + skipped
    context = tl.load(tile + 3) - first  # row of position 0; negative in a piece before
    end = first_position + num_rows
    begin, stop = tl.maximum(0, -context), tl.minimum(end, rows - context)  # positions in this piece
    if (num_rows <= 0) | (begin >= stop):
        return
    m, n, r, v = tl.arange(0, M), tl.arange(0, WIDE), tl.arange(0, R_PADDED), tl.arange(0, V_PADDED)
    position, there = first_position + m, (m < num_rows)[:, None]
    row = first_row.to(tl.int64) * H + head
    q_at = q_THD + row * (N + R) + m[:, None] * (H * (N + R))
    q = tl.load(q_at + n[None, :], mask=there & (n < N)[None, :], other=0.0)
    q_more = q
    if REST > 0:
        more = WIDE + tl.arange(0, REST)
        q_more = tl.load(q_at + more[None, :], mask=there & (more < N)[None, :], other=0.0)
    q_rotated = tl.load(q_at + N + r[None, :], mask=there & (r < R)[None, :], other=0.0)

    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, V_PADDED), tl.float32)
    offsets, mask = m[:, None] * (H * V) + v[None, :], there & (v < V)[None, :]
    tops, totals = stats_2TH + row, stats_2TH + num_tokens * H + row
    if begin > 0:
        top = tl.load(tops + m * H, mask=m < num_rows, other=0.0)
        total = tl.load(totals + m * H, mask=m < num_rows, other=1.0)
        sums = tl.load(sums_THV + row * V + offsets, mask=mask, other=0.0)
    column = head * (N + V)
    all_seen = begin + tl.maximum(0, tl.minimum(first_position + 1, stop) - begin) // STEP * STEP
    for at in tl.range(begin, all_seen, STEP, num_stages=STAGES):
        sums, top, total = _step(
            q, q_more, q_rotated, wide_keys, more_keys, rotated_keys, values, context + at, column, at, position,
            stop, scale_log2, sums, top, total, N, WIDE, REST, STEP, False,
        )  # fmt: skip
    for at in tl.range(all_seen, stop, STEP, num_stages=1):
        sums, top, total = _step(
            q, q_more, q_rotated, wide_keys, more_keys, rotated_keys, values, context + at, column, at, position,
            stop, scale_log2, sums, top, total, N, WIDE, REST, STEP, True,
        )  # fmt: skip
    if stop < end:
        tl.store(tops + m * H, top, mask=m < num_rows)
        tl.store(totals + m * H, total, mask=m < num_rows)
        tl.store(sums_THV + row * V + offsets, sums, mask=mask)
    else:
        tl.store(out_THV + row * V + offsets, (sums / total[:, None]).to(out_THV.dtype.element_ty), mask=mask)


@triton.jit
def _step(
    q, q_more, q_rotated, wide_keys, more_keys, rotated_keys, values, row, column, at, position, stop, scale_log2,
    sums, top, total,
    N: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Positions [at, at + STEP) of a context, from `row` of the piece on."""
    scores = tl.dot(q, wide_keys.load([row, column]).T, input_precision="ieee")
    if REST > 0:
        scores = tl.dot(q_more, more_keys.load([row, column + WIDE]).T, scores, input_precision="ieee")
    scores = tl.dot(q_rotated, rotated_keys.load([row, 0]).T, scores, input_precision="ieee")
    n = at + tl.arange(0, STEP)
    if MASKED:
        seen = (n[None, :] <= position[:, None]) & (n < stop)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_top[:, None])
    decay = tl.exp2(top - new_top)
    v = values.load([row, column + N])
    if MASKED:  # later positions belong to another request: 0 * NaN would be NaN
        v = tl.where((n < stop)[:, None], v, 0.0)
    sums = tl.dot(weights.to(v.dtype), v, sums * decay[:, None], input_precision="ieee")
    return sums, new_top, total * decay + tl.sum(weights, axis=1)


_GATHER, _MADE = Kernel(_gather), Kernel(_made)
