"""Small-M GEMMs with fp8 weights, on fp8 tensor cores. M rows, N outputs, K inputs, P parts, G groups of inputs.

A row is several 8-bit floats that add up to it (`fp8.Rounding`), so weights are streamed as they are stored: nothing converts
them. A step multiplies one group of inputs. Its sum is multiplied by the group's scale and added in float32: within the tensor
core sums of 8-bit floats have fewer bits.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.quantised.fp8 import FP8, Fp8Matrix, Fp8Rows, Rounding
from engine.kernels.quantised.triton_fp8_parts import first_part, neighbours_added, scale_and_inverse
from engine.kernels.triton_linear import (
    LINE_BYTES,
    gated_values,
    padded_rows,
    prefetch,
    room_for,
    splits_of,
    write_product,
    write_values,
)

# Prefetched elements of each weight row.
PREFETCH_LINES = 4
SPLITS = 4  # over K
# Maximum rows for which one tile has both parts.
PACKED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a GEMM."""

    rows: int  # weight rows of a program
    warps: int
    stages: int  # loop steps in flight
    programs: int = 1  # at once, a processor's
    splits: int = 1  # over K


# Most rows -> tiles: for products while 4 splits are no more programs than `programs`, for other products, for gate and up.
# Measured on an H200 with the shapes of Llama-3.1-8B (docs/design/quantised-gemm.md).
SHAPES = {
    PACKED_ROWS: (Tiles(64, 4, 8, 2), Tiles(64, 4, 6, 3), Tiles(128, 8, 4)),
    16: (Tiles(64, 4, 8, 2), Tiles(64, 4, 6, 3), Tiles(128, 8, 4)),
    32: (Tiles(64, 4, 6, 2), Tiles(64, 4, 4, 3), Tiles(128, 8, 4)),
    64: (Tiles(64, 4, 4, 2), Tiles(64, 4, 3, 3), Tiles(128, 8, 4)),
}


def few_rows(
    rows: Fp8Rows,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    partial: bool = False,
    activation: str | None = None,
) -> torch.Tensor:
    """Return the product [T, N], in `out` if it is given; `partial`: or its partial sums [P, T, N] float32.

    `activation`: return its gated product [T, I].
    """
    is_gated = activation is not None
    num_outputs = matrix.weight.shape[0] // (2 if is_gated else 1)
    tiles = _choose(rows, matrix, num_outputs, partial=partial, is_gated=is_gated)
    if out is None:
        out = room_for(tiles.splits, len(rows), num_outputs, rows.dtype, rows.values.device)
    _launch(rows, matrix, bias, out, None, tiles, activation)
    return out


def rounded_few_rows(
    rows: Fp8Rows, gate_up: Fp8Matrix, bias: torch.Tensor | None, rounding: Rounding, activation: str
) -> Fp8Rows | None:
    """Return the gated product quantised; None if no program has all outputs of a group, or they go to codes."""
    num_outputs, parts = gate_up.weight.shape[0] // 2, rows.values.shape[1]
    tiles = _choose(rows, gate_up, num_outputs, is_gated=True)
    if rounding != Rounding(tiles.rows, parts) or num_outputs % tiles.rows:
        return None
    device = rows.values.device
    found = Fp8Rows(
        torch.empty(rounding.shape(len(rows), num_outputs), dtype=FP8, device=device),
        torch.empty((len(rows), num_outputs // tiles.rows), dtype=torch.float32, device=device),
        rows.dtype,
    )
    _launch(rows, gate_up, bias, found.values, found.scale, tiles, activation)
    return found


def _choose(
    rows: Fp8Rows, matrix: Fp8Matrix, num_outputs: int, *, partial: bool = False, is_gated: bool = False
) -> Tiles:
    few, many, gated = next(shapes for most, shapes in SHAPES.items() if len(rows) <= most)
    if is_gated:
        return gated
    if not partial:
        return few
    steps, programs = rows.scale.shape[1], triton.cdiv(num_outputs, few.rows)
    # The largest power of 2 that divides the number of steps.
    most, processors = min(SPLITS, steps & -steps), describe(rows.values.device).processors
    tiles = few if most * programs <= few.programs * processors else many
    splits = splits_of(programs, most=most, at_once=tiles.programs * processors)
    return replace(tiles, splits=splits)


def _launch(
    rows: Fp8Rows,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    tiles: Tiles,
    activation: str | None,
) -> None:
    num_rows, parts, num_inputs = rows.values.shape
    if num_rows == 0:
        return
    num_outputs, num_groups, pdl = out.shape[-1], rows.scale.shape[1], describe(rows.values.device).has_tma
    group = num_inputs // num_groups
    is_packed = parts == 2 and num_rows <= PACKED_ROWS
    # A third part takes the shared memory of a stage.
    stages = tiles.stages - (parts > 2)
    _FEW_ROWS.launch(
        (triton.cdiv(num_outputs, tiles.rows), tiles.splits), None,
        rows.values, rows.scale, matrix.weight, out, rows.scale if out_scale is None else out_scale,
        matrix.scale if bias is None else bias, matrix.scale, num_rows, num_outputs, num_rows * num_outputs,
        K=num_inputs, GROUP=group, P=parts, BM=PACKED_ROWS if is_packed else padded_rows(num_rows), BN=tiles.rows,
        SPLITS=tiles.splits, GATED=activation is not None, GELU=activation == "gelu_tanh", HAS_BIAS=bias is not None,
        IN_BLOCKS=matrix.block is not None, BLOCK_N=matrix.block[0] if matrix.block else 1,
        BLOCK_K=matrix.block[1] if matrix.block else num_inputs, LINE=LINE_BYTES,
        LINES=min(PREFETCH_LINES, max(1, num_inputs // tiles.splits // LINE_BYTES)), PACKED=is_packed,
        ROUNDED=out_scale is not None, WIDE=rows.dtype == torch.bfloat16, PDL=pdl, STAGES=stages,
        num_warps=tiles.warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _sum(w, x_at, step, inside, K: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, R: tl.constexpr):
    """The product of a step's weights with all parts."""
    total = tl.zeros((BN, R), tl.float32)
    for part in tl.static_range(P):
        total = tl.dot(w, tl.trans(tl.load(x_at + part * K + step, mask=inside, other=0.0)), total)
    return total


@triton.jit(do_not_specialize=["M", "out_split"])
def _few_rows(
    x_MPK, x_scale_MG, w_NK, out, out_scale, bias_N, scales, M, N, out_split,
    K: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr, IN_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, PACKED: tl.constexpr, ROUNDED: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`scales`: one for each row of the weights, or one for each block; loop steps lie within blocks.

    PACKED: a tile of the activations has the two parts of each row side by side. ROUNDED: `out` and `out_scale` are rows in P
    parts, too, and a program's outputs are a group of them.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    K_SPLIT: tl.constexpr = K // SPLITS
    G: tl.constexpr = K // GROUP
    COLUMNS: tl.constexpr = K // BLOCK_K
    R: tl.constexpr = 2 * BM if PACKED else BM
    # The two parts of a row are adjacent columns of one tile.
    OF_TILE: tl.constexpr = P if PACKED else 1
    n, r, k = tile * BN + tl.arange(0, BN), tl.arange(0, R), tl.arange(0, GROUP)
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
    w_at = at + k[None, :]
    x_at = x_MPK + r[:, None] * (K * P // OF_TILE) + (begin + k)[None, :]
    inside = (r < M * OF_TILE)[:, None]
    scale_at = x_scale_MG + tl.minimum(r // OF_TILE, M - 1) * G
    acc = tl.zeros((BN, R), tl.float32)
    acc_up = acc
    for step in tl.range(0, K_SPLIT, GROUP, num_stages=STAGES):
        w = tl.load(w_at + step, eviction_policy="evict_first")
        if GATED:
            w_up = tl.load(w_at + up + step, eviction_policy="evict_first")
        scale = tl.load(scale_at + (begin + step) // GROUP)[None, :]
        total = _sum(w, x_at, step, inside, K, P // OF_TILE, BN, R)
        block = (begin + step) // BLOCK_K
        if IN_BLOCKS:
            total *= tl.load(scales + (last // BLOCK_N) * COLUMNS + block)[:, None]
        acc += total * scale
        if GATED:
            total = _sum(w_up, x_at, step, inside, K, P // OF_TILE, BN, R)
            if IN_BLOCKS:
                total *= tl.load(scales + ((last + N) // BLOCK_N) * COLUMNS + block)[:, None]
            acc_up += total * scale
    if PACKED:
        acc = neighbours_added(acc, BN, BM)
        acc_up = neighbours_added(acc_up, BN, BM)
    if not IN_BLOCKS:
        acc = acc * tl.load(scales + last)[:, None]
        if GATED:
            acc_up = acc_up * tl.load(scales + last + N)[:, None]
    m = tl.arange(0, BM)
    if ROUNDED:
        value = gated_values(acc, acc_up, bias_N, n, N, tl.bfloat16 if WIDE else tl.float16, GELU, HAS_BIAS)
        value = value.to(tl.float32)
        scale, inverse = scale_and_inverse(tl.max(tl.abs(value), axis=0))
        tl.store(out_scale + m * (N // BN) + tile, scale, mask=m < M)
        rest = value * inverse[None, :]
        for part in tl.static_range(P):
            rounded = first_part(rest) if part < P - 1 else rest
            rest -= rounded
            write_values(rounded, out + part * N, m, n, M, N, P * N)
    else:
        write_product(acc, acc_up, out, bias_N, m, n, M, N, split, N, out_split, GATED, GELU, HAS_BIAS)


_FEW_ROWS = Kernel(_few_rows)
