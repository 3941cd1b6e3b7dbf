"""Matrix products of few rows (decoding): the weights are streamed once, at memory speed. M rows, N outputs, K inputs.

The weight tile is the tensor core's wide operand and the few rows are its narrow one. Products whose N is too small to fill the
GPU are split over K: each split writes a float32 partial sum, and the RMSNorm that follows adds them up (`norm.add_rms_norm`).

With programmatic dependent launch a kernel starts while the one before it still runs: it asks for its first weights, which depend
on nobody, and waits only then (CUDA programming guide, "Programmatic Dependent Launch").
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as torch_linear
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels import activation
from engine.kernels.backend import programmatic_launch
from engine.kernels.launch import Kernel

PREFETCH = 256  # elements of each weight row asked for before the wait: measured on an H200


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Weight rows and inputs of a loop step, loop stages, warps, splits over K; chosen by measurement on an H200."""

    rows: int
    inputs: int
    stages: int
    warps: int
    splits: int = 1


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    parts: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    tiles = _choose(x, weight, parts)
    if tiles is None:
        if out is None:
            return torch_linear(x, weight, bias)
        return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    if tiles.splits > 1:
        out = torch.empty((tiles.splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    elif out is None:
        out = x.new_empty((num_rows, num_outputs))
    _launch(x, weight, bias, out, tiles, gated=False)
    return out


def linear_onto(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    if bias is not None or _choose(x, weight, parts=True) is not None:
        return linear(x, weight, bias, parts=True)
    residual.addmm_(x, weight.T)
    return None


def gated_linear(x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    tiles = _choose_gated(x, gate_up)
    if tiles is None:
        return activation.silu_and_mul(torch_linear(x, gate_up, bias))
    out = x.new_empty((x.shape[0], gate_up.shape[0] // 2))
    _launch(x, gate_up, bias, out, tiles, gated=True)
    return out


def _choose(x: torch.Tensor, weight: torch.Tensor, parts: bool) -> _Tiles | None:
    """None: the library's product is at least as fast, or the shape does not suit."""
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.shape
    if num_rows == 0 or num_rows > 64 or x.element_size() != 2 or num_inputs % 256:
        return None
    wave = 132  # programs that fill an H200 once
    row_tiles = triton.cdiv(num_outputs, 64)
    if row_tiles >= wave:
        return _Tiles(64, 128, 4, 4)
    if row_tiles > wave // 2:
        if num_rows <= 16 and parts:
            return _Tiles(32, 128, 6, 4, splits=2)
        return _Tiles(64, 128, 6, 4) if num_rows <= 32 else _Tiles(64, 64, 8, 4)
    if not parts:
        return _Tiles(32, 128, 6, 4)
    return _Tiles(64, 64, 8, 4, splits=2) if num_rows > 32 else _Tiles(64, 128, 6, 4, splits=2)


def _choose_gated(x: torch.Tensor, gate_up: torch.Tensor) -> _Tiles | None:
    num_rows, num_inputs = x.shape[0], gate_up.shape[1]
    if num_rows == 0 or num_rows > 128 or x.element_size() != 2 or num_inputs % 128:
        return None
    return _Tiles(64, 128, 4, 4) if num_rows <= 64 else _Tiles(128, 64, 4, 8)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tiles: _Tiles, *, gated: bool
) -> None:
    num_rows, num_outputs = x.shape[0], out.shape[-1]
    pdl = programmatic_launch(x)
    _FEW_ROWS.launch(
        (triton.cdiv(num_outputs, tiles.rows), tiles.splits), None,
        x, weight, out, weight if bias is None else bias, num_rows, num_outputs,
        x.stride(0), num_outputs, num_rows * num_outputs,
        K=weight.shape[1], BM=max(16, triton.next_power_of_2(num_rows)), BN=tiles.rows, BK=tiles.inputs,
        SPLITS=tiles.splits, GATED=gated, HAS_BIAS=bias is not None, PREFETCH=PREFETCH, PDL=pdl, STAGES=tiles.stages,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _prefetch(pointers):
    """Ask for the cache lines at `pointers`; nothing waits for them."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M", "out_split"])
def _few_rows(
    x_MK, w_NK, out, bias_N, M, N, x_row, out_row, out_split,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    K_SPLIT: tl.constexpr = K // SPLITS
    n = tile * BN + tl.arange(0, BN)
    k = split * K_SPLIT + tl.arange(0, BK)
    m = tl.arange(0, BM)
    row = tl.minimum(n, N - 1).to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            LINES: tl.constexpr = PREFETCH // 64  # cache lines of 128 bytes = 64 elements
            ahead = split * K_SPLIT + tl.arange(0, LINES) * 64
            _prefetch(w_NK + row[:, None] + ahead[None, :])
            if GATED:
                _prefetch(w_NK + row[:, None] + ahead[None, :] + N.to(tl.int64) * K)
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
    if HAS_BIAS and split == 0:
        acc += tl.load(bias_N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_N + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        dtype = out.dtype.element_ty
        gate, up_value = acc.to(dtype).to(tl.float32), acc_up.to(dtype).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up_value
    target = out + split.to(tl.int64) * out_split + m[None, :].to(tl.int64) * out_row + n[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


_FEW_ROWS = Kernel(_few_rows)
