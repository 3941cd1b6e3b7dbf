# ruff: noqa: SIM108 - Triton decides an `if` of constants at compile time, an expression at run time
"""Triton version of `activation`: blocks of a row. T rows, I intermediate size."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel

BLOCK = 1024


def act_and_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    num_rows = out.numel() // size if size else 0
    kernel = _SILU if activation == "silu" else _GELU
    kernel.launch((num_rows, triton.cdiv(size, BLOCK)), (gate_up.dtype, size), gate_up, out, size, BLOCK)
    return out


@triton.jit
def _silu_and_mul(gate_up_T2I, out_TI, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up_T2I + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_T2I + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_TI + row * size + at, out.to(out_TI.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_and_mul(gate_up_T2I, out_TI, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up_T2I + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_T2I + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_TI + row * size + at, (gelu_tanh(gate) * up).to(out_TI.dtype.element_ty), mask=inside)


def erf_gelu_and_mul(gate_up: torch.Tensor, *, is_up_first: bool) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    num_rows = out.numel() // size if size else 0
    _ERF.launch(
        (num_rows, triton.cdiv(size, BLOCK)), (gate_up.dtype, size, is_up_first), gate_up, out, size, BLOCK, is_up_first
    )
    return out


@triton.jit
def _erf_gelu_and_mul(gate_up_T2I, out_TI, size, BLOCK: tl.constexpr, UP_FIRST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    first = tl.load(gate_up_T2I + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(gate_up_T2I + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    if UP_FIRST:
        gate, up = second, first
    else:
        gate, up = first, second
    out = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    tl.store(out_TI + row * size + at, out.to(out_TI.dtype.element_ty), mask=inside)


@triton.jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(y)) = x sigmoid(2 y); `x` float32."""
    y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * y))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without a bound on x; `x` float32."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """gelu_tanh or silu; `gate` float32."""
    if GELU:
        gate = gelu_tanh(gate)
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate


def sparse_act_and_mul(gate_up: torch.Tensor, cutoff: float, activation: str) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    wide, is_gelu = triton.next_power_of_2(size), activation != "silu"
    _SPARSE.launch(
        (out.numel() // size,), (gate_up.dtype, size, is_gelu),
        gate_up, out, cutoff, size, wide, is_gelu, num_warps=16 if wide >= 8192 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _sparse_act_and_mul(
    gate_up_T2I, out_TI, cutoff, SIZE: tl.constexpr, WIDE: tl.constexpr, GELU: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    inside = at < SIZE
    gate = tl.load(gate_up_T2I + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(gate, axis=0) / SIZE
    away = tl.where(inside, gate - mean, 0.0)
    rest = away - cutoff * tl.sqrt(tl.sum(away * away, axis=0) / SIZE)
    up = tl.load(gate_up_T2I + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    out = activated(tl.maximum(rest, 0.0), GELU) * up
    tl.store(out_TI + row * SIZE + at, out.to(out_TI.dtype.element_ty), mask=inside)


def gated_heads(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    num_tokens, num_heads, dim = x.shape
    out, size, row = torch.empty_like(x), num_heads * dim, product.stride(0)
    fixed = (row, dim, size, BLOCK)
    _GATE.launch((num_tokens, triton.cdiv(size, BLOCK)), (x.dtype, fixed), x, product, out, *fixed)
    return out


@triton.jit
def _gated_heads(
    x_THD, product, out_THD, ROW: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(product + row * ROW + at // D * (2 * D) + D + at % D, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_THD + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_THD + row * SIZE + at, (x / (1.0 + tl.exp(-gate))).to(out_THD.dtype.element_ty), mask=inside)


_SILU, _GELU, _GATE = Kernel(_silu_and_mul), Kernel(_gelu_and_mul), Kernel(_gated_heads)
_SPARSE, _ERF = Kernel(_sparse_act_and_mul), Kernel(_erf_gelu_and_mul)
