# ruff: noqa: RUF005 - Triton knows no stars
"""Small-M GEMMs with 4-bit codes, on fp8 tensor cores. M rows, N outputs, K inputs.

The byte 0000cccc is, as e4m3, 2^-9 of the code c. So eight codes take three instructions. A bfloat16 number is the sum of two of
e4m3, see `fp8.Rounding`, whose products are exact; the tensor core adds those of a group, with some 14 bits.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.quantised.groups import FEW_ROWS, Groups
from engine.kernels.quantised.triton_fp8_parts import neighbours_added
from engine.kernels.triton_linear import prefetch, room_for, splits_of, write_product

# K elements per MMA accumulation group; K elements per packed block.
GROUP, COLUMNS = tl.constexpr(128), tl.constexpr(256)
_NIBBLES = tl.constexpr("and.b32 $0, $2, 0x0f0f0f0f; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f;")


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a GEMM. A block of a row is a cache line: the first `lines` are prefetched before the inputs are ready."""

    blocks: int  # blocks of a loop step
    stages: int  # steps in flight
    lines: int
    splits: int = 1  # over K


# Maximum rows of activations -> tiles. Measured on an H200 (docs/design/quantised-gemm.md).
TILES = {
    8: Tiles(blocks=2, stages=2, lines=4),
    16: Tiles(blocks=1, stages=3, lines=2),
    FEW_ROWS: Tiles(blocks=1, stages=2, lines=4),
}
# Fallback tiling when a split holds an odd number of blocks.
ONE_BLOCK = Tiles(blocks=1, stages=3, lines=2)
ROWS, WARPS = 64, 4  # minimum of `wgmma`
MOST_SPLITS = 8
PROGRAMS = 4  # programs of a processor, made by split-K
BESIDE_ROWS = 16  # with more, a row's parts are multiplied one after the other


def product_of_rows(
    values: torch.Tensor,
    scale: torch.Tensor,
    weight: Groups,
    bias: torch.Tensor | None,
    *,
    partial: bool = False,
) -> torch.Tensor:
    return few_rows(values, scale, weight, bias, partial=partial)


def gated_product_of_rows(
    values: torch.Tensor, scale: torch.Tensor, gate_up: Groups, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    return few_rows(values, scale, gate_up, bias, activation=activation)


def few_rows(
    values: torch.Tensor,
    scale: torch.Tensor,
    weight: Groups,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    partial: bool = False,
    activation: str | None = None,
) -> torch.Tensor:
    """Return the product [M, N] of quantised rows, in `out` if it is given; `partial`: or its partial sums [P, M, N] float32.

    `activation`: return its gated product.
    """
    num_rows, device, is_gated = len(values), values.device, activation is not None
    tiles = _choose(num_rows, weight, partial=partial)
    num_outputs, pdl = weight.outputs // (2 if is_gated else 1), describe(device).has_tma
    if out is None:
        out = room_for(tiles.splits, num_rows, num_outputs, torch.bfloat16, device)
    blocks = triton.cdiv(weight.blocks, tiles.splits)
    _FEW_ROWS.launch(
        (triton.cdiv(weight.outputs, ROWS), tiles.splits), None,
        values, scale, weight.codes.view(torch.uint8), weight.scales,
        weight.scales if weight.zeros is None else weight.zeros, out, weight.scales if bias is None else bias,
        num_rows, num_outputs, num_rows * num_outputs, N=num_outputs, K=weight.inputs,
        BM=max(8, triton.next_power_of_2(num_rows)), BN=ROWS, BLOCKS_STEP=tiles.blocks, SPLITS=tiles.splits,
        MIDDLE=weight.middle, HAS_ZEROS=weight.zeros is not None, GATED=is_gated, GELU=activation == "gelu_tanh",
        HAS_BIAS=bias is not None, LINES=min(tiles.lines, triton.next_power_of_2(blocks)),
        PREFETCH=triton.next_power_of_2(2 * blocks), JOINED=num_rows > BESIDE_ROWS, PDL=pdl,
        PLAIN=triton.knobs.runtime.interpret, STAGES=tiles.stages, num_warps=WARPS, num_stages=tiles.stages,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def _choose(num_rows: int, weight: Groups, *, partial: bool) -> Tiles:
    tiles = next(tiles for most, tiles in TILES.items() if num_rows <= most)
    splits = 1
    if partial:
        programs, processors = triton.cdiv(weight.outputs, ROWS), describe(weight.codes.device).processors
        splits = splits_of(programs, most=min(MOST_SPLITS, weight.blocks // 2), at_once=PROGRAMS * processors)
    if weight.blocks % (splits * tiles.blocks):
        tiles = ONE_BLOCK if tiles.blocks > 1 else tiles
    return replace(tiles, splits=splits)


@triton.jit
def _halves(codes, PLAIN: tl.constexpr):
    """The low and the high 4 bits of bytes [BN, 128], as e4m3: scaled by 2^-9; PLAIN as float32."""
    if PLAIN:
        return (codes & 15).to(tl.float32) / 512, (codes >> 4).to(tl.float32) / 512
    low, high = tl.inline_asm_elementwise(
        _NIBBLES, "=r,=r,r", [codes], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
    )
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _of_step(at, step, width, GROUPS: tl.constexpr):
    found = ()
    for i in tl.static_range(GROUPS):
        found = found + (tl.load(at + (step * GROUPS + i) * width),)
    return found


@triton.jit
def _sum(codes, x_at, there, K: tl.constexpr, JOINED: tl.constexpr):
    """The product of a group, [BN, BM], or of adjacent parts."""
    total = tl.dot(codes, tl.trans(tl.load(x_at, mask=there, other=0.0).to(codes.dtype)))
    if JOINED:
        total = tl.dot(codes, tl.trans(tl.load(x_at + K, mask=there, other=0.0).to(codes.dtype)), total)
    return total


@triton.jit
def _added(acc, total, scale, zero, x_scale, x_sum, BN: tl.constexpr, BM: tl.constexpr, JOINED: tl.constexpr):
    """`acc` [BN, BM] plus a group's sum."""
    if not JOINED:
        total = neighbours_added(total, BN, BM)
    return acc + (total * x_scale[None, :] - zero * x_sum[None, :]) * scale.to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["M", "out_split"])
def _few_rows(
    x_RK, x_scales, codes, scales, zeros, out, bias_N, M, out_row, out_split,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCKS_STEP: tl.constexpr, SPLITS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr,
    LINES: tl.constexpr, PREFETCH: tl.constexpr, JOINED: tl.constexpr, PDL: tl.constexpr,
    PLAIN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`x_RK`: both parts of each row; `x_scales` [2, K / GROUP, M], sums behind scales; `codes` bytes [N, K / 2].

    `scales`, `zeros` [G, N]. JOINED: parts are multiplied one after the other, not beside each other. GATED: a program has 8 rows
    of the gate, 8 of up and so on, so that a thread has both.
    """
    BYTES: tl.constexpr = COLUMNS // 2
    STEPS: tl.constexpr = K // COLUMNS // BLOCKS_STEP
    STEPS_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    GROUPS: tl.constexpr = 2 * BLOCKS_STEP
    SIDES: tl.constexpr = 2 if GATED else 1
    OF_ROW: tl.constexpr = K // GROUP
    tile, split = tl.program_id(0), tl.program_id(1)
    begin = split * STEPS_SPLIT
    end = tl.minimum(begin + STEPS_SPLIT, STEPS)
    first = tl.minimum(begin, STEPS - 1)  # the last split may be empty
    n = tile * (BN // SIDES) + tl.arange(0, BN // SIDES)
    if GATED:
        row = tl.arange(0, BN)
        known = tl.minimum(tile * (BN // 2) + row // 16 * 8 + row % 8, N - 1) + row // 8 % 2 * N
    else:
        known = tl.minimum(n, N - 1)
    at = codes + known.to(tl.int64)[:, None] * (K // 2)
    scales_at, zeros_at = scales + known, zeros + known
    # Scales have a long latency, so they are prefetched a step ahead, the first ones before the inputs are ready.
    scale = _of_step(scales_at, first, N * SIDES, GROUPS)
    zero = _of_step(zeros_at, first, N * SIDES, GROUPS) if HAS_ZEROS else scale
    if PDL:
        gdc_launch_dependents()
        ahead = tl.minimum(first * BLOCKS_STEP + tl.arange(0, LINES), K // COLUMNS - 1)
        prefetch(at + ahead[None, :] * BYTES)
        soon = tl.minimum(first * GROUPS + tl.arange(0, PREFETCH), OF_ROW - 1)
        both = tile * (BN // SIDES) + tl.arange(0, 2) * (N if GATED else BN // 2)
        prefetch(scales + soon[:, None] * (N * SIDES) + both[None, :])
        gdc_wait()
    m = tl.arange(0, BM)
    r = tl.arange(0, BM if JOINED else 2 * BM)
    at += tl.arange(0, BYTES)[None, :]
    x_at = x_RK + r[:, None] * (2 * K if JOINED else K) + tl.arange(0, GROUP)[None, :]
    there = (r < (M if JOINED else 2 * M))[:, None]
    x_scale_at = x_scales + tl.minimum(m, M - 1)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        following = tl.minimum(step + 1, STEPS - 1)
        next_scale = _of_step(scales_at, following, N * SIDES, GROUPS)
        next_zero = _of_step(zeros_at, following, N * SIDES, GROUPS) if HAS_ZEROS else next_scale
        sums = ()
        for i in tl.static_range(BLOCKS_STEP):
            block = step * BLOCKS_STEP + i
            low, high = _halves(tl.load(at + block * BYTES, eviction_policy="evict_first"), PLAIN)
            sums = sums + (
                _sum(low, x_at + block * COLUMNS, there, K, JOINED),
                _sum(high, x_at + block * COLUMNS + GROUP, there, K, JOINED),
            )
        for i in tl.static_range(GROUPS):
            group = step * GROUPS + i
            less = zero[i].to(tl.float32)[:, None] / 512 if HAS_ZEROS else MIDDLE / 512
            x_scale, x_sum = tl.load(x_scale_at + group * M), tl.load(x_scale_at + (OF_ROW + group) * M)
            acc = _added(acc, sums[i], scale[i], less, x_scale, x_sum, BN, BM, JOINED)
        scale, zero = next_scale, next_zero
    acc *= 512.0
    acc_up = acc
    if GATED:
        both = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
        acc, acc_up = tl.split(tl.reshape(both, (BN // 2, BM, 2)))
    write_product(acc, acc_up, out, bias_N, m, n, M, N, split, out_row, out_split, GATED, GELU, HAS_BIAS)


_FEW_ROWS = Kernel(_few_rows)
