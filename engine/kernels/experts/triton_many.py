# ruff: noqa: SIM108 - Triton decides an `if` of constants at compile time, an expression at run time
"""The experts' GEMMs for many tokens: tiles of an expert's tokens, weights by TMA. M pairs of a tile, N outputs.

The tokens of a tile lie anywhere, so their rows are gathered; the weights' tiles are rectangles of one tall matrix, whose rows
beyond an expert's own are computed and not written.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.experts.mixture import Product
from engine.kernels.experts.triton_few import write_result
from engine.kernels.launch import Kernel


@dataclass(frozen=True, slots=True)
class Shape:
    """The tile shape of a program."""

    outputs: int
    inputs: int  # K elements of a loop step
    stages: int
    warps: int


GATED_SHAPE = Shape(128, 64, 4, 8)  # 128 outputs of both halves
ONE_SHAPE = Shape(256, 64, 4, 8)


def write(product: Product) -> None:
    """Write each pair's activation, or its weighted output, in place."""
    x, shape = product.x, GATED_SHAPE if product.sides == 2 else ONE_SHAPE
    num_outputs, num_inputs = product.outputs, x.shape[1]
    step = min(shape.inputs, max(16, triton.next_power_of_2(num_inputs)))
    assert isinstance(product.matrices, torch.Tensor)
    tall = product.matrices.flatten(0, 1)
    rows = TensorDescriptor(tall, list(tall.shape), list(tall.stride()), [shape.outputs, step])
    fixed = (
        num_outputs, num_inputs, product.chosen, product.tile, shape.outputs, step,
        *product.flags, num_inputs % step != 0, shape.stages,
    )  # fmt: skip
    _MANY.launch(
        (triton.cdiv(num_outputs, shape.outputs), product.num_tiles), (*product.dtypes, *fixed),
        x, rows, *product.behind, *fixed, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "alpha", "limit"])
def _many(
    x, matrices, out, bias_EN, weights_P, order_P, tiles_S4, num_tokens, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FIRST: tl.constexpr, SIDES: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr,
    RAGGED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`x` is [T, K] for the first GEMM, else [P, K]."""
    tile = tl.program_id(1)
    first_output = tl.program_id(0) * BN
    expert = tl.load(tiles_S4 + tile * 4)
    if expert >= 0:
        first, count = tl.load(tiles_S4 + tile * 4 + 1), tl.load(tiles_S4 + tile * 4 + 2)
        m, k = tl.arange(0, BM), tl.arange(0, BK)
        n = first_output + tl.arange(0, BN)
        there = m < count
        # Rows beyond the tile's own repeat its first row, and their results are not written.
        pair = tl.load(order_P + first + tl.where(there, m, 0))
        x_row = (pair // CHOSEN if FIRST else pair).to(tl.int64) * K
        x_at = x + x_row[:, None] + k[None, :]
        row = expert * (SIDES * N) + first_output
        acc = tl.zeros((BM, BN), tl.float32)
        if SIDES == 2:
            acc_up = tl.zeros((BM, BN), tl.float32)
        for at in tl.range(0, K, BK, num_stages=STAGES):
            if RAGGED:
                rows = tl.load(x_at + at, mask=(at + k < K)[None, :], other=0.0)
            else:
                rows = tl.load(x_at + at)
            acc = tl.dot(rows, matrices.load([row, at]).T, acc, input_precision="ieee")
            if SIDES == 2:
                acc_up = tl.dot(rows, matrices.load([row + N, at]).T, acc_up, input_precision="ieee")
        write_result(
            acc, acc_up if SIDES == 2 else acc, out, bias_EN, weights_P, pair, expert, n, there, num_tokens, alpha, limit,
            N, CHOSEN, FIRST, SIDES, HAS_BIAS, WEIGHTED, CLAMPED, GELU, 1,
        )  # fmt: skip


_MANY = Kernel(_many)
