# ruff: noqa: SIM108 - Triton decides an `if` of constants at compile time, an expression at run time
"""The experts' GEMMs for many tokens with 4-bit or 8-bit codes. M pairs of a tile, N outputs, K inputs.

The weights are the tensor core's wide operand: each code becomes a number once, in registers, for all pairs of a tile. A gate's
rows and those of up share a program's rows, so one sum holds both. Codes are a few bytes of a step beside its gathered tokens:
the bulk copy engine, which can't gather rows, would save nothing.
"""

import triton
import triton.language as tl

from engine.kernels.experts.mixture import Product
from engine.kernels.experts.triton_few import write_result
from engine.kernels.launch import Kernel
from engine.kernels.quantised.fp8 import Fp8Matrix
from engine.kernels.quantised.groups import Groups
from engine.kernels.quantised.triton_bytes import weights_as
from engine.kernels.quantised.triton_codes import accumulate
from engine.kernels.quantised.triton_groups import constants, dtypes, operands, stages_of

TILE = 128  # pairs
# A program's weight rows; half of them are the gate's, half are up's.
ROWS, WARPS = 128, 8
# Bytes for the groups' blocks in flight.
ROOM = 200 << 10
# K elements of a loop step: they divide K, see `formats.fp8`.
FP8_STAGES, FP8_INPUTS = 4, 64


def write(product: Product) -> None:
    """Write each pair's activation, or its weighted output, in place."""
    matrices, x = product.matrices, product.x
    grid = (triton.cdiv(product.outputs, ROWS // product.sides), product.num_tiles)
    cut = (product.outputs, x.shape[1], product.chosen, product.tile, ROWS, *product.flags)
    if isinstance(matrices, Groups):
        stages = stages_of(matrices, ROOM, rows=product.tile, outputs=ROWS)
        fixed = (*cut, stages, *constants(matrices).values())
        _MANY_GROUPS.launch(
            grid, (*product.dtypes, *dtypes(matrices), *fixed), x, *operands(matrices), *product.behind, *fixed,
            num_warps=WARPS, num_stages=stages,
        )  # fmt: skip
    else:
        assert isinstance(matrices, Fp8Matrix)
        by_bits = x.element_size() == 2 and not triton.knobs.runtime.interpret
        fixed = (*cut, FP8_INPUTS, FP8_STAGES, matrices.block is not None, *(matrices.block or (1, 1)), by_bits)
        _MANY_FP8.launch(
            grid, (*product.dtypes, *fixed), x, matrices.weight, matrices.scale, *product.behind, *fixed,
            num_warps=WARPS, num_stages=FP8_STAGES,
        )  # fmt: skip


@triton.jit
def _rows(expert, N: tl.constexpr, BN: tl.constexpr, SIDES: tl.constexpr):
    """A program's rows within an expert's: the first half are the gate's, the second half those of up."""
    r = tl.arange(0, BN)
    if SIDES == 2:
        HALF: tl.constexpr = BN // 2
        row = tl.minimum(tl.program_id(0) * HALF + r % HALF, N - 1) + (r // HALF) * N
    else:
        row = tl.minimum(tl.program_id(0) * BN + r, N - 1)
    return row


@triton.jit
def _pairs(order_P, first, count, CHOSEN: tl.constexpr, BM: tl.constexpr, FIRST: tl.constexpr):
    """The pairs of a tile, the mask of valid ones, and their rows of `x`. Invalid ones repeat the first pair."""
    m = tl.arange(0, BM)
    there = m < count
    pair = tl.load(order_P + first + tl.where(there, m, 0))
    if FIRST:
        row = pair // CHOSEN
    else:
        row = pair
    return pair, there, row.to(tl.int64)


@triton.jit
def _write(
    acc, out, bias_EN, weights_P, pair, expert, there, num_tokens, alpha, limit,
    N: tl.constexpr, CHOSEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr, SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Write sums [BN, BM]."""
    if SIDES == 2:
        HALF: tl.constexpr = BN // 2
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BM)), (1, 2, 0)))
        n = tl.program_id(0) * HALF + tl.arange(0, HALF)
    else:
        gate = acc
        up = acc
        n = tl.program_id(0) * BN + tl.arange(0, BN)
    write_result(
        gate, up, out, bias_EN, weights_P, pair, expert, n, there, num_tokens, alpha, limit,
        N, CHOSEN, FIRST, SIDES, HAS_BIAS, WEIGHTED, CLAMPED, GELU, 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "alpha", "limit"])
def _many_groups(
    x, codes, scales, lower, out, bias_EN, weights_P, order_P, tiles_S4, num_tokens, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr,
    SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, STAGES: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """`x` is [T, K] for the first GEMM, else [P, K]. The gate's rows precede the N of up."""
    COLUMNS: tl.constexpr = W * 32 // BITS
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    at = tiles_S4 + tl.program_id(1) * 4
    expert = tl.load(at)
    if expert >= 0:
        pair, there, x_row = _pairs(order_P, tl.load(at + 1), tl.load(at + 2), CHOSEN, BM, FIRST)
        row, before = _rows(expert, N, BN, SIDES), expert.to(tl.int64) * (SIDES * N)
        c = tl.arange(0, W)
        acc, _ = accumulate(
            codes + (before + row)[:, None] * (BLOCKS * W) + c[None, :], 0,
            scales + before * G + row, lower + (0 if LEVELS else before * G + row), N, SIDES * N,
            x + x_row[:, None] * K + c[None, :], there, 0, BLOCKS, K, BM, BN, W, G, GROUP, BITS, MIDDLE,
            HAS_ZEROS, HAS_MINIMUMS, E2M1, LEVELS, PLAIN, x.dtype.element_ty, False, STAGES,
        )  # fmt: skip
        _write(
            acc, out, bias_EN, weights_P, pair, expert, there, num_tokens, alpha, limit,
            N, CHOSEN, BM, BN, FIRST, SIDES, HAS_BIAS, WEIGHTED, CLAMPED, GELU,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "alpha", "limit"])
def _many_fp8(
    x, w_ENK, scales, out, bias_EN, weights_P, order_P, tiles_S4, num_tokens, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr,
    SIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, IN_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BY_BITS: tl.constexpr,
):  # fmt: skip
    """As `_many_groups`; a scale for each row, or for each block."""
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K if IN_BLOCKS else 1
    at = tiles_S4 + tl.program_id(1) * 4
    expert = tl.load(at)
    if expert >= 0:
        pair, there, x_row = _pairs(order_P, tl.load(at + 1), tl.load(at + 2), CHOSEN, BM, FIRST)
        row, before = _rows(expert, N, BN, SIDES), expert.to(tl.int64)
        k = tl.arange(0, BK)
        w_at = w_ENK + (before * (SIDES * N) + row)[:, None] * K + k[None, :]
        x_at = x + x_row[:, None] * K + k[None, :]
        scale_at = scales + before * (((SIDES * N + BLOCK_N - 1) // BLOCK_N) * COLUMNS) + (row // BLOCK_N) * COLUMNS
        acc = tl.zeros((BN, BM), tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            w, rows = tl.load(w_at + start), tl.load(x_at + start)
            if IN_BLOCKS:
                scale = tl.load(scale_at + start // BLOCK_K)
                acc += (
                    tl.dot(weights_as(w, rows.dtype, BY_BITS), tl.trans(rows), input_precision="ieee") * scale[:, None]
                )
            else:
                acc = tl.dot(weights_as(w, rows.dtype, BY_BITS), tl.trans(rows), acc, input_precision="ieee")
        if not IN_BLOCKS:
            acc = acc * tl.load(scale_at)[:, None]
        _write(
            acc, out, bias_EN, weights_P, pair, expert, there, num_tokens, alpha, limit,
            N, CHOSEN, BM, BN, FIRST, SIDES, HAS_BIAS, WEIGHTED, CLAMPED, GELU,
        )  # fmt: skip


_MANY_GROUPS, _MANY_FP8 = Kernel(_many_groups), Kernel(_many_fp8)
