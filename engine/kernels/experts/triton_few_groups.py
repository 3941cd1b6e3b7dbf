"""The experts' GEMMs with matrices in groups of 4 or 8 bits, see `groups`. M pairs of a tile, N outputs, K inputs.

Tiles are those of `triton_few`: the codes of a tile are read from memory, made numbers in registers, and multiplied with up to 64
pairs. More go to `triton_many_codes` where the device has room for its tiles.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.experts.mixture import Product
from engine.kernels.experts.triton_few import write_result
from engine.kernels.launch import Kernel
from engine.kernels.quantised.groups import Groups
from engine.kernels.quantised.triton_codes import accumulate
from engine.kernels.quantised.triton_groups import constants, dtypes, operands, stages_of

OUTPUTS, WARPS = 64, 4
# Bytes for the blocks in flight.
ROOM = 72 << 10


def write(product: Product) -> None:
    """Write each pair's activation, or its weighted output, in place."""
    matrices, x = product.matrices, product.x
    assert isinstance(matrices, Groups)
    pdl, rows = describe(x.device).has_tma, max(16, product.tile)
    stages = stages_of(matrices, ROOM, rows=rows, outputs=OUTPUTS * product.sides)
    fixed = (
        product.outputs, matrices.inputs, product.chosen, rows, OUTPUTS, product.tile == 0, *product.flags, pdl, stages,
         *constants(matrices).values(),
    )  # fmt: skip
    _FEW_GROUPS.launch(
        (triton.cdiv(product.outputs, OUTPUTS), product.num_tiles), (*product.dtypes, *dtypes(matrices), *fixed),
        x, *operands(matrices), *product.behind, *fixed, num_warps=WARPS, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "alpha", "limit"])
def _few_groups(
    x, codes, scales, lower, out, bias_EN, weights_P, order_P, tiles_S4, num_tokens, alpha, limit,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALONE: tl.constexpr,
    FIRST: tl.constexpr, SIDES: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """`x` is [T, K] for the first GEMM, else [P, K]. The gate's rows precede the N of up."""
    COLUMNS: tl.constexpr = W * 32 // BITS
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m, c = tl.arange(0, BM), tl.arange(0, W)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if ALONE:
        expert, first, count = tl.load(tiles_S4 + tile), tile, 1
    else:
        expert = tl.load(tiles_S4 + tile * 4)
        first, count = tl.load(tiles_S4 + tile * 4 + 1), tl.load(tiles_S4 + tile * 4 + 2)
    if expert >= 0:
        there = m < count
        pair = first + m if ALONE else tl.load(order_P + first + m, mask=there, other=0)
        known, before = tl.minimum(n, N - 1), expert.to(tl.int64) * (SIDES * N)
        words_at = codes + (before + known)[:, None] * (BLOCKS * W) + c[None, :]
        x_row = (pair // CHOSEN if FIRST else pair).to(tl.int64) * K
        acc, acc_up = accumulate(
            words_at, tl.cast(N, tl.int64) * (BLOCKS * W), scales + before * G + known,
            lower + (0 if LEVELS else before * G + known), N, SIDES * N, x + x_row[:, None] + c[None, :], there, 0, BLOCKS,
            K, BM, BN, W, G, GROUP, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS, E2M1, LEVELS, PLAIN, x.dtype.element_ty,
            SIDES == 2, STAGES,
        )  # fmt: skip
        write_result(
            acc, acc_up, out, bias_EN, weights_P, pair, expert, n, there, num_tokens, alpha, limit,
            N, CHOSEN, FIRST, SIDES, HAS_BIAS, WEIGHTED, CLAMPED, GELU, 0,
        )  # fmt: skip


_FEW_GROUPS = Kernel(_few_groups)
