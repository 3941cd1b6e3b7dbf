"""Triton version of `groups`. M rows, N outputs, K inputs.

Few rows: the codes are streamed once, made numbers of the activations' type in registers and given to the tensor core from there;
N is its wide dimension.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as torch_linear
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.activation import act_and_mul
from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.quantised.fp8 import Fp8Rows, quantise_rows
from engine.kernels.quantised.groups import Groups, rounding_of
from engine.kernels.quantised.triton_codes import accumulate, first_group, groups_of, of_group, weights
from engine.kernels.quantised.triton_groups_few import few_rows
from engine.kernels.triton_linear import padded_rows, prefetch, room_for, splits_of, write_product

MAX_ROWS = 64  # with more, cuBLAS multiplies dequantised weights
PREFETCH_WORDS = 64  # prefetched words of each row
MOST_STAGES = 6
# The fewest rows of a program that fill the tensor core's operand.
FEWEST_ROWS = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a GEMM."""

    rows: int  # weight rows of a program
    warps: int
    room: int  # bytes for the blocks in flight
    programs: float  # programs of a processor, made by split-K
    splits: int = 1  # over K
    stages: int = MOST_STAGES  # blocks in flight, at most


# Maximum rows of activations -> tiles that fill shared memory and registers. Measured on an H200 (docs/design/quantised-gemm.md).
TILES = {
    4: Tiles(rows=32, warps=2, room=64 << 10, programs=6, stages=4),
    32: Tiles(rows=64, warps=4, room=72 << 10, programs=3),
    MAX_ROWS: Tiles(rows=128, warps=8, room=200 << 10, programs=1.25),
}
# Shared memory of devices before Hopper.
SMALL_ROOM = 72 << 10
MOST_SPLITS = 4
# Fewest blocks of a split-K part.
FEWEST_BLOCKS = 4


def dequantised(codes: torch.Tensor, weight: Groups, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((weight.outputs, weight.inputs), dtype=dtype, device=codes.device)
    blocks, rows = weight.blocks, 32
    _DEQUANTISE.launch(
        (triton.cdiv(weight.outputs, rows), blocks), None,
        *operands(weight), out, weight.outputs, K=weight.inputs, BN=rows, **constants(weight), num_warps=4,
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor, weight: Groups, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    if not _suits(x):
        plain = dequantised(weight.codes, weight, x.dtype)
        if out is None:
            return torch_linear(x, plain, bias)
        return torch.mm(x, plain.T, out=out) if bias is None else torch.addmm(bias, x, plain.T, out=out)
    if (rows := _rounded(x, weight)) is not None:
        return few_rows(rows.values, rows.scale, weight, bias, out=out)
    if out is None:
        out = x.new_empty((x.shape[0], weight.outputs))
    _launch(x, weight, bias, out, _choose(x, weight, weight.outputs, parts=False))
    return out


def linear_parts(x: torch.Tensor, weight: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    if not _suits(x):
        return torch_linear(x, dequantised(weight.codes, weight, x.dtype), bias)
    if (rows := _rounded(x, weight)) is not None:
        return few_rows(rows.values, rows.scale, weight, bias, partial=True)
    tiles = _choose(x, weight, weight.outputs, parts=True)
    out = room_for(tiles.splits, x.shape[0], weight.outputs, x.dtype, x.device)
    _launch(x, weight, bias, out, tiles)
    return out


def linear_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: Groups, bias: torch.Tensor | None
) -> torch.Tensor | None:
    if bias is not None or _suits(x):
        return linear_parts(x, weight, bias)
    residual.addmm_(x, dequantised(weight.codes, weight, x.dtype).T)
    return None


def gated_linear(x: torch.Tensor, gate_up: Groups, bias: torch.Tensor | None, activation: str = "silu") -> torch.Tensor:
    if not _suits(x):
        return act_and_mul(torch_linear(x, dequantised(gate_up.codes, gate_up, x.dtype), bias), activation)
    if (rows := _rounded(x, gate_up)) is not None:
        return few_rows(rows.values, rows.scale, gate_up, bias, activation=activation)
    outputs = gate_up.outputs // 2
    out = x.new_empty((x.shape[0], outputs))
    tiles = _choose(x, gate_up, outputs, parts=False)
    _launch(x, gate_up, bias, out, tiles, gated=True, gelu=activation == "gelu_tanh")
    return out


def _rounded(x: torch.Tensor, weight: Groups) -> Fp8Rows | None:
    rounding = rounding_of(weight, len(x), x.dtype)
    return None if rounding is None else quantise_rows(x, rounding)


def _suits(x: torch.Tensor) -> bool:
    """True if the small-M kernel applies."""
    return 0 < x.shape[0] <= MAX_ROWS and x.element_size() == 2


def _choose(x: torch.Tensor, weight: Groups, outputs: int, *, parts: bool) -> Tiles:
    """A tiling with enough programs for every processor."""
    device, sides = describe(x.device), weight.outputs // outputs
    tiles = next(tiles for most, tiles in TILES.items() if x.shape[0] <= most)
    if not device.has_tma:
        tiles = replace(tiles, room=SMALL_ROOM)
    programs = triton.cdiv(outputs, tiles.rows)
    if not parts:
        is_enough = programs >= device.processors or sides > 1 or tiles.rows == FEWEST_ROWS
        return tiles if is_enough else replace(tiles, rows=tiles.rows // 2)
    most = min(MOST_SPLITS, weight.blocks // FEWEST_BLOCKS)
    return replace(tiles, splits=splits_of(programs, most=most, at_once=tiles.programs * device.processors))


def stages_of(weight: Groups, room: int, *, rows: int, outputs: int, most: int = MOST_STAGES) -> int:
    """Blocks in flight that fit shared memory; `outputs`: rows of the weight that a program reads."""
    bytes_of_block = outputs * weight.words * 4 + rows * weight.columns * 2
    return max(2, min(most, room // bytes_of_block))


def _launch(
    x: torch.Tensor,
    weight: Groups,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    *,
    gated: bool = False,
    gelu: bool = False,
) -> None:
    """Write the product of few rows to `out` [T, N], or its partial sums [P, T, N]."""
    num_rows, num_outputs = x.shape[0], out.shape[-1]
    pdl, rows = describe(x.device).has_tma, padded_rows(num_rows)
    stages = stages_of(weight, tiles.room, most=tiles.stages, rows=rows, outputs=tiles.rows * (2 if gated else 1))
    _FEW_ROWS.launch(
        (triton.cdiv(num_outputs, tiles.rows), tiles.splits), None,
        x, *operands(weight), out, weight.scales if bias is None else bias, num_rows,
        x.stride(0), num_outputs, num_rows * num_outputs, N=num_outputs, K=weight.inputs,
        BM=rows, BN=tiles.rows, SPLITS=tiles.splits,
        **constants(weight), GATED=gated, GELU=gelu, HAS_BIAS=bias is not None,
        PREFETCH=min(PREFETCH_WORDS, triton.next_power_of_2(weight.codes.shape[-1] // tiles.splits)), PDL=pdl,
        STAGES=stages, num_warps=tiles.warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


def operands(weight: Groups) -> tuple[torch.Tensor, ...]:
    """Codes, scales, and zeros, minimums or levels."""
    lower = next((each for each in (weight.zeros, weight.minimums, weight.levels) if each is not None), weight.scales)
    return weight.codes, weight.scales, lower


def dtypes(weight: Groups) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the scales, and of zeros, minimums or levels."""
    _, scales, lower = operands(weight)
    return scales.dtype, lower.dtype


def constants(weight: Groups) -> dict[str, int | bool]:
    return {
        "W": weight.words,
        "G": weight.scales.shape[-2],
        "GROUP": weight.group,
        "BITS": weight.bits,
        "MIDDLE": weight.middle,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_MINIMUMS": weight.minimums is not None,
        "E2M1": weight.is_e2m1,
        "LEVELS": weight.levels is not None,
        "PLAIN": triton.knobs.runtime.interpret,  # which can't run PTX
    }


@triton.jit
def _dequantise(
    codes, scales, lower, out_NK, N,
    K: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = W * PLANES
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, W)
    block = tl.program_id(1)
    row = tl.minimum(n, N - 1)
    words = tl.load(codes + row.to(tl.int64)[:, None] * (BLOCKS * W) + block * W + c[None, :])
    first = first_group(block, G, GROUP, COLUMNS)
    for i in tl.static_range(PLANES):
        k = block * COLUMNS + i * W
        j = i * groups_of(GROUP, COLUMNS) // PLANES
        scale = of_group(scales + row, first, j, N, G, GROUP, COLUMNS)
        less = of_group(lower + row, first, j, N, G, GROUP, COLUMNS) if HAS_ZEROS or HAS_MINIMUMS else scale
        w = weights(
            words, scale, less, lower, i, BN, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS, E2M1, LEVELS, PLAIN,
            out_NK.dtype.element_ty,
        )  # fmt: skip
        at = out_NK + n.to(tl.int64)[:, None] * K + (k + c)[None, :]
        tl.store(at, w, mask=(n < N)[:, None] & (k + c < K)[None, :])


_DEQUANTISE = Kernel(_dequantise)


@triton.jit(do_not_specialize=["M", "out_split"])
def _few_rows(
    x_MK, codes, scales, lower, out, bias_N, M, x_row, out_row, out_split,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr, PLAIN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = W * PLANES
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    BLOCKS_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    DTYPE: tl.constexpr = x_MK.dtype.element_ty
    SIDES: tl.constexpr = 2 if GATED else 1
    tile, split = tl.program_id(0), tl.program_id(1)
    begin = split * BLOCKS_SPLIT
    end = tl.minimum(begin + BLOCKS_SPLIT, BLOCKS)
    n = tile * BN + tl.arange(0, BN)
    m, c = tl.arange(0, BM), tl.arange(0, W)
    known = tl.minimum(n, N - 1)
    at = codes + known.to(tl.int64)[:, None] * (BLOCKS * W)
    up = tl.cast(N, tl.int64) * (BLOCKS * W)
    if PDL:
        gdc_launch_dependents()
        LINES: tl.constexpr = (PREFETCH + 31) // 32  # cache lines of 128 bytes = 32 words
        ahead = begin * W + tl.arange(0, LINES)[None, :] * 32
        prefetch(at + ahead)
        if GATED:
            prefetch(at + up + ahead)
        gdc_wait()
    acc, acc_up = accumulate(
        at + c[None, :], up, scales + known, lower + (0 if LEVELS else known), N, N * SIDES,
        x_MK + m[:, None] * x_row + c[None, :], m < M, begin, end, K, BM, BN, W, G, GROUP, BITS, MIDDLE, HAS_ZEROS,
        HAS_MINIMUMS, E2M1, LEVELS, PLAIN, DTYPE, GATED, STAGES,
    )  # fmt: skip
    write_product(
        acc, acc_up, out, bias_N, m, n, M, N, split, out_row, out_split, GATED, GELU, HAS_BIAS
    )  # fmt: skip


_FEW_ROWS = Kernel(_few_rows)
