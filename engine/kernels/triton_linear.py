"""Small-M GEMMs (decoding): the weights are streamed once, at memory speed. M rows, N outputs, K inputs.

The weight tile is the tensor core's wide operand, the few rows its narrow one. If N is too small to fill the GPU, the product is
split over K: each split writes a float32 partial sum, which the next RMSNorm adds up (`norm.add_rms_norm`).

With programmatic dependent launch a kernel starts while the one before still runs: it asks for its first weights, and only then
waits (CUDA programming guide, "Programmatic Dependent Launch").
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as torch_linear
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.activation import ACTIVATIONS, act_and_mul
from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.triton_activation import activated

PREFETCH_ELEMENTS = 256  # prefetched elements of each weight row, of 2 bytes (H200)
LINE_BYTES = 128
MAX_ROWS, MAX_GATED_ROWS = 64, 128  # with more, cuBLAS is at least as fast
INPUTS_MULTIPLE, GATED_INPUTS_MULTIPLE = 256, 128  # K consists of whole loop steps, in each split


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a GEMM, measured on an H200, by the share of processors that a shape keeps busy."""

    rows: int  # weight rows of a program
    inputs: int  # inputs of a loop step
    stages: int  # loop steps in flight
    warps: int
    splits: int = 1  # over K


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    tiles = _choose(x, weight, parts=False)
    if tiles is None:
        if out is None:
            return torch_linear(x, weight, bias)
        return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    launch_product(x, weight, bias, out, tiles)
    return out


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    tiles = _choose(x, weight, parts=True)
    if tiles is None:
        return torch_linear(x, weight, bias)
    out = room_for(tiles.splits, x.shape[0], weight.shape[0], x.dtype, x.device)
    launch_product(x, weight, bias, out, tiles)
    return out


def linear_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    if bias is not None or _choose(x, weight, parts=True) is not None:
        return linear_parts(x, weight, bias)
    residual.addmm_(x, weight.T)
    return None


def activated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    if bias is None or _choose(x, weight, parts=False) is not None or not _in_epilogue(x, activation):
        return ACTIVATIONS[activation](linear(x, weight, bias))
    return torch._addmm_activation(bias, x, weight.T, use_gelu=True)


def _in_epilogue(x: torch.Tensor, activation: str) -> bool:
    """True if the vendor's product computes the activation in x's dtype, before it writes.

    It has GELU by tanh, at most 5e-4 from the one by erf: less than the roundings of bfloat16, not than those of float16.
    """
    is_gelu = activation == "gelu_tanh" or (activation == "gelu" and x.dtype == torch.bfloat16)
    return x.is_cuda and x.element_size() == 2 and is_gelu


def gated_linear(
    x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    tiles = _choose_gated(x, gate_up)
    if tiles is None:
        return act_and_mul(torch_linear(x, gate_up, bias), activation)
    out = x.new_empty((x.shape[0], gate_up.shape[0] // 2))
    launch_product(x, gate_up, bias, out, tiles, gated=True, gelu=activation == "gelu_tanh")
    return out


def _choose(x: torch.Tensor, weight: torch.Tensor, *, parts: bool) -> Tiles | None:
    """The tiling, or None if cuBLAS is at least as fast or the shape is unsupported."""
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.shape
    if num_rows == 0 or num_rows > MAX_ROWS or x.element_size() != 2 or num_inputs % INPUTS_MULTIPLE:
        return None
    processors = describe(x.device).processors
    row_tiles = triton.cdiv(num_outputs, 64)
    if row_tiles >= processors:
        return Tiles(64, 128, 4, 4)
    if row_tiles > processors // 2:
        if num_rows <= 16 and parts:
            return Tiles(32, 128, 6, 4, splits=2)
        return Tiles(64, 128, 6, 4) if num_rows <= 32 else Tiles(64, 64, 8, 4)
    if not parts:
        return Tiles(32, 128, 6, 4)
    return Tiles(64, 64, 8, 4, splits=2) if num_rows > 32 else Tiles(64, 128, 6, 4, splits=2)


def _choose_gated(x: torch.Tensor, gate_up: torch.Tensor) -> Tiles | None:
    num_rows, num_inputs = x.shape[0], gate_up.shape[1]
    if num_rows == 0 or num_rows > MAX_GATED_ROWS or x.element_size() != 2 or num_inputs % GATED_INPUTS_MULTIPLE:
        return None
    return Tiles(64, 128, 4, 4) if num_rows <= 64 else Tiles(128, 64, 4, 8)


def padded_rows(num_rows: int) -> int:
    """Rows of the tensor core's narrow operand."""
    return max(16, triton.next_power_of_2(num_rows))


def splits_of(programs: int, *, most: int, at_once: float) -> int:
    """Split-K: a power of 2, at most `most`, with at most `at_once` programs in all."""
    splits = 1
    while 2 * splits <= most and 2 * splits * programs <= at_once:
        splits *= 2
    return splits


def room_for(splits: int, num_rows: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a product [T, N], or for its partial sums [P, T, N] float32."""
    shape = (num_rows, num_outputs)
    if splits == 1:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((splits, *shape), dtype=torch.float32, device=device)


def launch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
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
        x, weight, out, weight if bias is None else bias, num_rows, num_outputs, x.stride(0), num_outputs, num_rows * num_outputs,
        K=weight.shape[1], BM=padded_rows(num_rows), BN=tiles.rows, BK=tiles.inputs,
        SPLITS=tiles.splits, GATED=gated, GELU=gelu, HAS_BIAS=bias is not None,
        LINE=LINE_BYTES // weight.element_size(), LINES=PREFETCH_ELEMENTS * 2 // LINE_BYTES, PDL=pdl,
        STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines at `pointers`."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def write_product(
    acc, acc_up, out, bias_N, m, n, M, N, split, out_row, out_split,
    GATED: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write sums [BN, BM] with their bias, added by the first split, or their gated activation."""
    if GATED:
        acc = gated_values(acc, acc_up, bias_N, n, N, out.dtype.element_ty, GELU, HAS_BIAS)
    elif HAS_BIAS and split == 0:
        acc += tl.load(bias_N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    write_values(acc, out + split.to(tl.int64) * out_split, m, n, M, N, out_row)


@triton.jit
def gated_values(acc, acc_up, bias_N, n, N, DTYPE: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The gated activation of two sums with bias, in `DTYPE`."""
    if HAS_BIAS:
        acc += tl.load(bias_N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        acc_up += tl.load(bias_N + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    gate, up = acc.to(DTYPE).to(tl.float32), acc_up.to(DTYPE).to(tl.float32)
    return (activated(gate, GELU).to(DTYPE).to(tl.float32) * up).to(DTYPE)


@triton.jit
def write_values(values, out, m, n, M, N, out_row):
    """Write values [BN, BM] to rows `m` and columns `n`."""
    target = out + m[None, :].to(tl.int64) * out_row + n[:, None]
    tl.store(target, values.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["M", "out_split"])
def _few_rows(
    x_MK, w_NK, out, bias_N, M, N, x_row, out_row, out_split,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr, LINE: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    K_SPLIT: tl.constexpr = K // SPLITS
    n = tile * BN + tl.arange(0, BN)
    k = split * K_SPLIT + tl.arange(0, BK)
    m = tl.arange(0, BM)
    row = tl.minimum(n, N - 1).to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        if LINES > 0:
            ahead = split * K_SPLIT + tl.arange(0, LINES) * LINE
            prefetch(w_NK + row[:, None] + ahead[None, :])
            if GATED:
                prefetch(w_NK + row[:, None] + ahead[None, :] + N.to(tl.int64) * K)
        gdc_wait()
    w_at = w_NK + row[:, None] + k[None, :]
    x_at = x_MK + m[:, None] * x_row + k[None, :]
    inside = (m < M)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        up_at = w_at + N.to(tl.int64) * K
        acc_up = tl.zeros((BN, BM), tl.float32)
    for at in tl.range(0, K_SPLIT, BK, num_stages=STAGES):
        w = tl.load(w_at + at, eviction_policy="evict_first")
        x = tl.load(x_at + at, mask=inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
        if GATED:
            up = tl.load(up_at + at, eviction_policy="evict_first")
            acc_up = tl.dot(up, tl.trans(x), acc_up)
    write_product(
        acc, acc_up if GATED else acc, out, bias_N, m, n, M, N, split, out_row, out_split, GATED, GELU, HAS_BIAS
    )  # fmt: skip


_FEW_ROWS = Kernel(_few_rows)
