"""Triton version of `groups`. M rows, N outputs, K inputs.

Few rows: the codes are streamed once, made numbers of the activations' type in registers and given to the tensor core from there;
N is its wide dimension.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as torch_linear
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.activation import act_and_mul
from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.quantised.groups import WORDS, Groups
from engine.kernels.quantised.triton_codes import accumulate, weights
from engine.kernels.triton_linear import prefetch, write_product

MAX_ROWS = 64  # with more, the vendor's library multiplies what one kernel has dequantised
PREFETCH_WORDS = 64  # leading ones of each row


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut."""

    rows: int  # weight rows of a program
    stages: int  # blocks in flight
    warps: int
    splits: int = 1  # over K


def dequantised(codes: torch.Tensor, weight: Groups, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((weight.outputs, weight.inputs), dtype=dtype, device=codes.device)
    blocks, rows = weight.codes.shape[-1] // WORDS, 32
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
    if out is None:
        out = x.new_empty((x.shape[0], weight.outputs))
    _launch(x, weight, bias, out, _choose(x, weight, parts=False))
    return out


def linear_parts(x: torch.Tensor, weight: Groups, bias: torch.Tensor | None) -> torch.Tensor:
    if not _suits(x):
        return torch_linear(x, dequantised(weight.codes, weight, x.dtype), bias)
    tiles = _choose(x, weight, parts=True)
    shape, dtype = (x.shape[0], weight.outputs), x.dtype
    if tiles.splits > 1:
        shape, dtype = (tiles.splits, *shape), torch.float32
    out = torch.empty(shape, dtype=dtype, device=x.device)
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
    out = x.new_empty((x.shape[0], gate_up.outputs // 2))
    _launch(x, gate_up, bias, out, Tiles(64, 4, 4), gated=True, gelu=activation == "gelu_tanh")
    return out


def _suits(x: torch.Tensor) -> bool:
    """Whether the kernel of few rows computes this."""
    return 0 < x.shape[0] <= MAX_ROWS and x.element_size() == 2


def _choose(x: torch.Tensor, weight: Groups, *, parts: bool) -> Tiles:
    """Enough programs for every processor; a split has four blocks or more."""
    processors, blocks = describe(x.device).processors, weight.codes.shape[-1] // WORDS
    tiles = triton.cdiv(weight.outputs, 64)
    rows = 64 if tiles >= processors or parts else 32
    splits = 1
    while parts and tiles * splits < processors and blocks // (2 * splits) >= 4 and splits < 4:
        splits *= 2
    return Tiles(rows, 6, 4, splits)


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
    pdl = describe(x.device).has_tma
    _FEW_ROWS.launch(
        (triton.cdiv(num_outputs, tiles.rows), tiles.splits), None,
        x, *operands(weight), out, weight.scales if bias is None else bias, num_rows, num_outputs,
        x.stride(0), num_outputs, num_rows * num_outputs,
        K=weight.inputs, BM=max(16, triton.next_power_of_2(num_rows)), BN=tiles.rows, SPLITS=tiles.splits,
        **constants(weight), GATED=gated, GELU=gelu, HAS_BIAS=bias is not None,
        PREFETCH=min(PREFETCH_WORDS, triton.next_power_of_2(weight.codes.shape[-1] // tiles.splits)), PDL=pdl,
        STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip


def operands(weight: Groups) -> tuple[torch.Tensor, ...]:
    """Codes, scales, and zeros, minimums or levels."""
    lower = next((each for each in (weight.zeros, weight.minimums, weight.levels) if each is not None), weight.scales)
    return weight.codes, weight.scales, lower


def dtypes(weight: Groups) -> tuple[torch.dtype, torch.dtype]:
    """Of the scales, and of zeros, minimums or levels."""
    _, scales, lower = operands(weight)
    return scales.dtype, lower.dtype


def constants(weight: Groups) -> dict[str, int | bool]:
    return {
        "G": weight.scales.shape[-2],
        "GROUP": weight.group,
        "BITS": weight.bits,
        "MIDDLE": weight.middle,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_MINIMUMS": weight.minimums is not None,
        "E2M1": weight.is_e2m1,
        "LEVELS": weight.levels is not None,
        "PLAIN": triton.knobs.runtime.interpret,  # which has no instructions of a GPU
    }


@triton.jit
def _dequantise(
    codes, scales, lower, out_NK, N,
    K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 16 * PLANES
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 16)
    block = tl.program_id(1)
    row = tl.minimum(n, N - 1)
    words = tl.load(codes + row.to(tl.int64)[:, None] * (BLOCKS * 16) + block * 16 + c[None, :])
    for i in tl.static_range(PLANES):
        k = block * COLUMNS + i * 16
        group = tl.minimum(k // GROUP, G - 1)
        w = weights(
            words, scales + row, lower + (0 if LEVELS else row), group, N, i, BN, BITS, MIDDLE, HAS_ZEROS, HAS_MINIMUMS,
            E2M1, LEVELS, True, PLAIN, out_NK.dtype.element_ty,
        )  # fmt: skip
        at = out_NK + n.to(tl.int64)[:, None] * K + (k + c)[None, :]
        tl.store(at, w, mask=(n < N)[:, None] & (k + c < K)[None, :])


_DEQUANTISE = Kernel(_dequantise)


@triton.jit(do_not_specialize=["M", "out_split"])
def _few_rows(
    x_MK, codes, scales, lower, out, bias_N, M, N, x_row, out_row, out_split,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, E2M1: tl.constexpr, LEVELS: tl.constexpr, PLAIN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 16 * PLANES
    BLOCKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    BLOCKS_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    DTYPE: tl.constexpr = x_MK.dtype.element_ty
    SIDES: tl.constexpr = 2 if GATED else 1
    tile, split = tl.program_id(0), tl.program_id(1)
    begin = split * BLOCKS_SPLIT
    end = tl.minimum(begin + BLOCKS_SPLIT, BLOCKS)
    n = tile * BN + tl.arange(0, BN)
    m, c = tl.arange(0, BM), tl.arange(0, 16)
    known = tl.minimum(n, N - 1)
    at = codes + known.to(tl.int64)[:, None] * (BLOCKS * 16)
    up = N.to(tl.int64) * (BLOCKS * 16)
    if PDL:
        gdc_launch_dependents()
        LINES: tl.constexpr = (PREFETCH + 31) // 32  # cache lines of 128 bytes = 32 words
        ahead = begin * 16 + tl.arange(0, LINES)[None, :] * 32
        prefetch(at + ahead)
        if GATED:
            prefetch(at + up + ahead)
        gdc_wait()
    acc, acc_up = accumulate(
        at + c[None, :], up, scales + known, lower + (0 if LEVELS else known), N, N * SIDES,
        x_MK + m[:, None] * x_row + c[None, :], m < M, begin, end, K, BM, BN, G, GROUP, BITS, MIDDLE, HAS_ZEROS,
        HAS_MINIMUMS, E2M1, LEVELS, PLAIN, DTYPE, GATED, STAGES,
    )  # fmt: skip
    write_product(
        acc, acc_up, out, bias_N, m, n, M, N, split, out_row, out_split, GATED, GELU, HAS_BIAS
    )  # fmt: skip


_FEW_ROWS = Kernel(_few_rows)
