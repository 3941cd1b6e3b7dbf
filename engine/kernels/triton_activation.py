"""Triton version of `activation`: blocks of a row. T rows, I intermediate size."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel

BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    num_rows = out.numel() // size if size else 0
    _SILU.launch((num_rows, triton.cdiv(size, BLOCK)), (gate_up.dtype, size), gate_up, out, size, BLOCK)
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


_SILU = Kernel(_silu_and_mul)
