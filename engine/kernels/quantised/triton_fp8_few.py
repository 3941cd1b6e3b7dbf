"""Products of few rows with 8-bit floats: codes are streamed once and become 16 bits in registers. M rows, N outputs, K inputs.

Four codes are loaded as a word, so that each thread has its part of the tensor core's operand in whole words. Of two neighbouring
words the tensor core gets two codes at a time: four planes, each times the inputs at the same places.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.quantised.fp8 import FEW_ROWS, Fp8Matrix
from engine.kernels.quantised.triton_bytes import e4m3_plane
from engine.kernels.triton_linear import LINE_BYTES, Tiles, padded_rows, prefetch, splits_of, write_product

# Leading ones of each weight row.
PREFETCH_LINES = 4
SMALLEST_STEP = 64  # inputs
SPLITS = 4  # over K
# A split product's programs, at most, of each processor.
PROGRAMS = 4


# By rows: the product, and gate and up. Measured on an H200 with the shapes of Llama-3.1-8B.
SHAPES = {
    16: (Tiles(64, 256, 4, 4), Tiles(64, 256, 3, 4)),
    32: (Tiles(64, 128, 4, 4), Tiles(64, 128, 4, 4)),
    64: (Tiles(128, 128, 4, 8), Tiles(128, 128, 4, 8)),
}


def choose(x: torch.Tensor, matrix: Fp8Matrix, *, parts: bool = False, gated: bool = False) -> Tiles | None:
    """The tiles; None where there are more rows, or the shape does not suit."""
    num_rows, (num_outputs, num_inputs) = x.shape[0], matrix.weight.shape
    longest = num_inputs if matrix.block is None else matrix.block[1]
    if not 0 < num_rows <= FEW_ROWS or x.element_size() != 2 or num_inputs % SMALLEST_STEP or longest % SMALLEST_STEP:
        return None
    tiles = SHAPES[padded_rows(num_rows)][gated]
    step = tiles.inputs
    while num_inputs % step or longest % step:
        step //= 2
    steps, programs = num_inputs // step, triton.cdiv(num_outputs, tiles.rows)
    # The largest power of 2 that divides the steps.
    most = min(SPLITS, steps & -steps) if parts else 1
    splits = splits_of(programs, most=most, at_once=PROGRAMS * describe(x.device).processors)
    return replace(tiles, inputs=step, splits=splits)


def launch(
    x: torch.Tensor,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    *,
    gated: bool = False,
    gelu: bool = False,
) -> None:
    """Write the product to `out` [T, N], or its partial sums [P, T, N]."""
    num_rows, num_outputs, pdl = x.shape[0], out.shape[-1], describe(x.device).has_tma
    _FEW_ROWS.launch(
        (triton.cdiv(num_outputs, tiles.rows), tiles.splits), None,
        x, matrix.weight, out, matrix.scale if bias is None else bias, matrix.scale,
        num_rows, num_outputs, x.stride(0), num_outputs, num_rows * num_outputs,
        K=matrix.weight.shape[1], BM=padded_rows(num_rows), BN=tiles.rows, BK=tiles.inputs, SPLITS=tiles.splits,
        GATED=gated, GELU=gelu, HAS_BIAS=bias is not None, IN_BLOCKS=matrix.block is not None,
        BLOCK_N=matrix.block[0] if matrix.block else 1, BLOCK_K=matrix.block[1] if matrix.block else 1,
        LINE=LINE_BYTES, LINES=PREFETCH_LINES, PDL=pdl, PLAIN=triton.knobs.runtime.interpret, STAGES=tiles.stages,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _plane(words, codes_at, plane: tl.constexpr, PLAIN: tl.constexpr, DTYPE: tl.constexpr):
    """The codes at the places of a plane as numbers. PLAIN: loaded one by one, as the interpreter knows no instructions."""
    if PLAIN:
        return tl.load(codes_at + 2 * plane).to(DTYPE)
    return e4m3_plane(words, plane, DTYPE)


@triton.jit(do_not_specialize=["M", "out_split"])
def _few_rows(
    x_MK, w_NK, out, bias_N, scales, M, N, x_row, out_row, out_split,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr, IN_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`scales`: one for each row of the weights, or one for each block, within which loop steps lie."""
    tile, split = tl.program_id(0), tl.program_id(1)
    K_SPLIT: tl.constexpr = K // SPLITS
    WORDS: tl.constexpr = BK // 4
    COLUMNS: tl.constexpr = K // BLOCK_K
    DTYPE: tl.constexpr = x_MK.dtype.element_ty
    n, m, word = tile * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, WORDS)
    begin = split * K_SPLIT
    last = tl.minimum(n, N - 1)
    at = w_NK + last.to(tl.int64)[:, None] * K + begin
    up = N.to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        ahead = tl.arange(0, LINES)[None, :] * LINE
        prefetch(at + ahead)
        if GATED:
            prefetch(at + up + ahead)
        gdc_wait()
    # Of each word the place of the code that the first plane has.
    column = (word // 2) * 8 + word % 2
    codes_at = at + column[None, :]
    words_at = at
    if not PLAIN:
        words_at = at.to(tl.pointer_type(tl.int32), bitcast=True) + word[None, :]
    x_at = x_MK + m[:, None] * x_row + (begin + column)[None, :]
    inside = (m < M)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = acc
    for step in tl.range(0, K_SPLIT, BK, num_stages=STAGES):
        words = words_at
        words_up = words_at
        if not PLAIN:
            words = tl.load(words_at + step // 4, eviction_policy="evict_first")
            if GATED:
                words_up = tl.load(words_at + (up + step) // 4, eviction_policy="evict_first")
        total, total_up = acc, acc_up
        if IN_BLOCKS:
            total = tl.zeros((BN, BM), tl.float32)
            total_up = total
        for plane in tl.static_range(4):
            x = tl.load(x_at + step + 2 * plane, mask=inside, other=0.0)
            total = tl.dot(_plane(words, codes_at + step, plane, PLAIN, DTYPE), tl.trans(x), total)
            if GATED:
                w_up = _plane(words_up, codes_at + up + step, plane, PLAIN, DTYPE)
                total_up = tl.dot(w_up, tl.trans(x), total_up)
        if IN_BLOCKS:
            block = (begin + step) // BLOCK_K
            acc += total * tl.load(scales + (last // BLOCK_N) * COLUMNS + block)[:, None]
            if GATED:
                acc_up += total_up * tl.load(scales + ((last + N) // BLOCK_N) * COLUMNS + block)[:, None]
        else:
            acc, acc_up = total, total_up
    if not IN_BLOCKS:
        acc = acc * tl.load(scales + last)[:, None]
        if GATED:
            acc_up = acc_up * tl.load(scales + last + N)[:, None]
    write_product(acc, acc_up, out, bias_N, m, n, M, N, split, out_row, out_split, GATED, GELU, HAS_BIAS)


_FEW_ROWS = Kernel(_few_rows)
