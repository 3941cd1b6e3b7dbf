# ruff: noqa: SIM108 - Triton decides an `if` of constants at compile time, an expression at run time
"""The experts' GEMMs for few tokens: weights are streamed once, at memory speed. M pairs of a tile, N outputs, K inputs.

The weight tile is the tensor core's wide operand, the few tokens its narrow one (as in `triton_linear`). The second product
begins while the first one runs and asks for its first weights: the experts are known by then.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.experts.mixture import Product
from engine.kernels.launch import Kernel
from engine.kernels.quantised.fp8 import Fp8Matrix
from engine.kernels.quantised.triton_bytes import weights_as
from engine.kernels.triton_activation import gelu_tanh
from engine.kernels.triton_linear import prefetch

PREFETCH_ELEMENTS = 256  # prefetched elements of each weight row of the second GEMM


@dataclass(frozen=True, slots=True)
class Shape:
    """The tile shape of a program."""

    outputs: int
    inputs: int  # K elements of a loop step
    stages: int
    warps: int


# Token-expert pairs a tile (0: one) -> tile shapes for gate and up, and for down. Measured on an H200: 128 experts of 768 over
# 2048, 8 a token.
SHAPES: dict[int, tuple[Shape, Shape]] = {
    0: (Shape(64, 64, 4, 4), Shape(64, 128, 4, 4)),
    16: (Shape(64, 128, 3, 4), Shape(64, 128, 3, 4)),
    32: (Shape(64, 128, 4, 4), Shape(64, 128, 3, 4)),
    64: (Shape(64, 64, 4, 4), Shape(128, 64, 4, 4)),
}
# Tile shape for ungrouped token-expert pairs while one wave of programs fits the GPU.
ONE_ROUND = Shape(64, 64, 6, 4)


def write(product: Product) -> None:
    """Write each pair's activation, or its weighted output, in place."""
    stored, x, tile, first = product.matrices, product.x, product.tile, product.first
    matrices, scales, kind, block = stored, None, 0, (1, 1)
    if isinstance(stored, Fp8Matrix):
        matrices, scales, kind, block = stored.weight, stored.scale, 2 if stored.block else 1, stored.block or (1, 1)
    device, num_outputs, num_inputs = describe(x.device), product.outputs, x.shape[1]
    shape = SHAPES[tile][0 if first else 1]
    if first and tile == 0 and product.num_tiles * triton.cdiv(num_outputs, ONE_ROUND.outputs) <= device.processors:
        shape = ONE_ROUND
    pdl, is_interpreted = device.has_tma, triton.knobs.runtime.interpret
    step = min(shape.inputs, max(16, triton.next_power_of_2(num_inputs)))
    if kind == 2 and block[1] % step:
        step = 64  # loop steps lie within blocks
    fixed = (
        num_outputs, num_inputs, product.chosen, max(16, tile), shape.outputs, step, tile == 0,
        *product.flags, num_inputs % step != 0,
        0 if first or num_inputs < PREFETCH_ELEMENTS or is_interpreted else PREFETCH_ELEMENTS, pdl, shape.stages, kind, *block,
        kind > 0 and x.element_size() == 2 and not is_interpreted,
    )  # fmt: skip
    _FEW.launch(
        (triton.cdiv(num_outputs, shape.outputs), product.num_tiles), (*product.dtypes, *fixed),
        x, matrices, scales, *product.behind, *fixed,
        num_warps=shape.warps, num_stages=shape.stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def write_result(
    acc, acc_up, out, bias_EN, weights_P, pair, expert, n, there, num_tokens, alpha, limit,
    N: tl.constexpr, CHOSEN: tl.constexpr, FIRST: tl.constexpr, SIDES: tl.constexpr, HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CLAMPED: tl.constexpr, GELU: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Write the activation of the pairs [BM], or their weighted outputs, each in place.

    Products [BN, BM], or [BM, BN]: AXIS is that of the outputs.
    """
    there, pair = tl.expand_dims(there, AXIS), tl.expand_dims(pair, AXIS)
    n_inside, n = tl.expand_dims(n < N, 1 - AXIS), tl.expand_dims(n, 1 - AXIS)
    if WEIGHTED:
        weight = tl.load(weights_P + pair, mask=there, other=0.0)
    if SIDES == 2:
        if WEIGHTED:
            acc, acc_up = acc * weight, acc_up * weight
        if HAS_BIAS:
            bias_at = bias_EN + expert.to(tl.int64) * (2 * N) + n
            acc += tl.load(bias_at, mask=n_inside, other=0.0).to(tl.float32)
            acc_up += tl.load(bias_at + N, mask=n_inside, other=0.0).to(tl.float32)
        if CLAMPED:
            acc = tl.minimum(acc, limit)
            acc_up = tl.minimum(tl.maximum(acc_up, -limit), limit) + 1.0
        if GELU:
            acc = gelu_tanh(acc) * acc_up
        else:
            acc = acc / (1.0 + tl.exp(-alpha * acc)) * acc_up
        target = out + pair.to(tl.int64) * N + n
    elif FIRST:
        if WEIGHTED:
            acc = acc * weight
        if HAS_BIAS:
            acc += tl.load(bias_EN + expert.to(tl.int64) * N + n, mask=n_inside, other=0.0).to(tl.float32)
        acc = tl.maximum(acc, 0.0)
        acc = acc * acc
        target = out + pair.to(tl.int64) * N + n
    else:
        if HAS_BIAS:
            acc += tl.load(bias_EN + expert.to(tl.int64) * N + n, mask=n_inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            acc = acc * weight
        place = (pair % CHOSEN).to(tl.int64) * num_tokens + pair // CHOSEN
        target = out + place * N + n
    tl.store(target, acc.to(out.dtype.element_ty), mask=there & n_inside)


@triton.jit(do_not_specialize=["num_tokens", "alpha", "limit"])
def _few(
    x, w_ENK, scales, out, bias_EN, weights_P, order_P, tiles_S4, num_tokens, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ALONE: tl.constexpr, FIRST: tl.constexpr, SIDES: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    CLAMPED: tl.constexpr,
    GELU: tl.constexpr, RAGGED: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """`x` is [T, K] for the first GEMM, else [P, K]. With two SIDES the matrices [E, 2 N, K] have the gate's rows first.

    SCALES of 8-bit floats: 0 none, 1 one for each row, 2 one for each block.
    """
    tile = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m, k = tl.arange(0, BM), tl.arange(0, BK)
    if PDL:
        if FIRST:
            gdc_wait()
            gdc_launch_dependents()
        else:
            gdc_launch_dependents()
    if ALONE:
        expert, first, count = tl.load(tiles_S4 + tile), tile, 1
    else:
        expert = tl.load(tiles_S4 + tile * 4)
        first, count = tl.load(tiles_S4 + tile * 4 + 1), tl.load(tiles_S4 + tile * 4 + 2)
    if expert >= 0:
        there = m < count
        pair = first + m if ALONE else tl.load(order_P + first + m, mask=there, other=0)
        last = tl.minimum(n, N - 1)
        row = (expert.to(tl.int64) * (SIDES * N) + last) * K
        COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K if SCALES == 2 else 1
        own_scales = expert.to(tl.int64) * (((SIDES * N + BLOCK_N - 1) // BLOCK_N) * COLUMNS)
        if PREFETCH > 0:
            LINES: tl.constexpr = PREFETCH // 64  # cache lines of 128 bytes = 64 elements
            prefetch(w_ENK + row[:, None] + tl.arange(0, LINES)[None, :] * 64)
        if PDL and not FIRST:
            gdc_wait()
        x_row = (pair // CHOSEN if FIRST else pair).to(tl.int64) * K
        w_at = w_ENK + row[:, None] + k[None, :]
        x_at = x + x_row[:, None] + k[None, :]
        acc = tl.zeros((BN, BM), tl.float32)
        if SIDES == 2:
            up_at = w_at + tl.cast(N, tl.int64) * K
            acc_up = tl.zeros((BN, BM), tl.float32)
        for at in tl.range(0, K, BK, num_stages=STAGES):
            if RAGGED:
                known = (at + k < K)[None, :]
                w = tl.load(w_at + at, mask=known, other=0.0, eviction_policy="evict_first")
                rows = tl.load(x_at + at, mask=there[:, None] & known, other=0.0)
            else:
                w = tl.load(w_at + at, eviction_policy="evict_first")
                rows = tl.load(x_at + at, mask=there[:, None], other=0.0)
            if SCALES == 2:
                scale_at = scales + own_scales + at // BLOCK_K
                scale = tl.load(scale_at + (last // BLOCK_N) * COLUMNS)
                acc += (
                    tl.dot(weights_as(w, rows.dtype, BY_BITS), tl.trans(rows), input_precision="ieee") * scale[:, None]
                )
            else:
                acc = tl.dot(weights_as(w, rows.dtype, BY_BITS), tl.trans(rows), acc, input_precision="ieee")
            if SIDES == 2:
                if RAGGED:
                    up = tl.load(up_at + at, mask=known, other=0.0, eviction_policy="evict_first")
                else:
                    up = tl.load(up_at + at, eviction_policy="evict_first")
                if SCALES == 2:
                    scale = tl.load(scale_at + ((last + N) // BLOCK_N) * COLUMNS)
                    acc_up += (
                        tl.dot(weights_as(up, rows.dtype, BY_BITS), tl.trans(rows), input_precision="ieee")
                        * scale[:, None]
                    )
                else:
                    acc_up = tl.dot(weights_as(up, rows.dtype, BY_BITS), tl.trans(rows), acc_up, input_precision="ieee")
        if SCALES == 1:
            acc = acc * tl.load(scales + own_scales + last)[:, None]
            if SIDES == 2:
                acc_up = acc_up * tl.load(scales + own_scales + last + N)[:, None]
        write_result(
            acc, acc_up if SIDES == 2 else acc, out, bias_EN, weights_P, pair, expert, n, there, num_tokens, alpha, limit,
            N, CHOSEN, FIRST, SIDES, HAS_BIAS, WEIGHTED, CLAMPED, GELU, 0,
        )  # fmt: skip


_FEW = Kernel(_few)
