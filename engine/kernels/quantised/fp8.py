"""Products with weights of 8-bit floats. T tokens, K inputs, N outputs, I intermediate size, P partial sums.

On a GPU few rows are multiplied as they are: the weights become 16 bits in registers. Many rows become 8-bit floats themselves,
each with scales of its own, so that the tensor cores multiply 8 bits by 8 bits. The plain versions here multiply the weights
that the bits stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear as torch_linear

from engine.kernels.activation import act_and_mul
from engine.kernels.device import use_triton
from engine.kernels.norm import add_and_norm, rms_norm
from engine.kernels.twin import twin

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1e-12  # rows of nothing
FEW_ROWS = 64  # are multiplied with 16 bits


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [N, K]: e4m3 times a scale for each row, or for each block of rows and inputs. Or one of each expert."""

    weight: torch.Tensor  # [..., N, K] e4m3
    scale: torch.Tensor  # float32 [..., N], or [..., blocks of N, of K]
    block: tuple[int, int] | None = None  # rows, inputs

    def __getitem__(self, expert: int) -> Fp8Matrix:
        return Fp8Matrix(self.weight[expert], self.scale[expert], self.block)

    def plain(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix in floats of another type."""
        wide = self.weight.float()
        if self.block is None:
            return wide.mul_(self.scale[:, None]).to(dtype)
        scale = self.scale.repeat_interleave(self.block[0], 0)[: len(wide)]
        return wide.mul_(scale.repeat_interleave(self.block[1], 1)[:, : wide.shape[1]]).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations [T, K]: e4m3 times a scale for each row, or for each group of inputs in it."""

    values: torch.Tensor  # [T, K] e4m3
    scale: torch.Tensor  # float32 [T, 1] or [T, K / group]
    dtype: torch.dtype  # the results have

    def __len__(self) -> int:
        return len(self.values)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether kernels for 8-bit floats run there: on GPUs since 2022 (compute capability 8.9)."""
    if device.type != "cuda":
        return use_triton(torch.empty(0))
    return torch.cuda.get_device_capability(device) >= (8, 9)


@twin("engine.kernels.quantised.triton_fp8")
def product(
    x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ matrix.T + bias [T, N], in `out` if it is given. `x` [T, K]."""
    result = torch_linear(x, matrix.plain(x.dtype), bias)
    return result if out is None else out.copy_(result)


@twin("engine.kernels.quantised.triton_fp8")
def product_parts(x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Like `product`, or partial sums [P, T, N] float32 that the next kernel adds up as it reads."""
    return torch_linear(x, matrix.plain(x.dtype), bias)


@twin("engine.kernels.quantised.triton_fp8")
def gated_product(
    x: torch.Tensor, gate_up: Fp8Matrix, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """Return act(x @ gate.T) * (x @ up.T) [T, I]. `gate_up` holds the gate's rows first. "silu" or "gelu_tanh"."""
    return act_and_mul.reference(torch_linear(x, gate_up.plain(x.dtype), bias), activation)


@twin("engine.kernels.quantised.triton_fp8_rows")
def quantise_rows(x: torch.Tensor, group: int | None = None) -> Fp8Rows:
    """Round rows [T, K] to e4m3, with a scale for each row or for each `group` of its inputs (K is a multiple)."""
    wide = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    scale = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    values = (wide / scale).clamp(-LARGEST, LARGEST).to(FP8)
    return Fp8Rows(values.flatten(-2), scale.squeeze(-1), x.dtype)


@twin("engine.kernels.quantised.triton_fp8")
def product_of_rows(
    values: torch.Tensor, scale: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product [T, N] of rows that are 8-bit floats already, the fields of `Fp8Rows`."""
    wide = values.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
    return torch_linear(wide.flatten(-2).to(dtype), matrix.plain(dtype), bias)


@twin("engine.kernels.quantised.triton_fp8_rows")
def normed_rows(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    group: int | None = None,
) -> tuple[Fp8Rows, torch.Tensor]:
    """Return `quantise_rows` of rms_norm(x + residual), and x + residual; see `norm.add_rms_norm`."""
    if x is None:
        return quantise_rows.reference(rms_norm.reference(residual, weight, eps, plus_one=plus_one), group), residual
    normed, total = add_and_norm.reference(x, residual, weight, eps, plus_one=plus_one)
    return quantise_rows.reference(normed, group), total


@twin("engine.kernels.quantised.triton_fp8_rows")
def gated_rows(gate_up: torch.Tensor, activation: str = "silu", group: int | None = None) -> Fp8Rows:
    """Return `quantise_rows` of act(gate) * up for `gate_up` [T, 2 I], the two halves side by side."""
    return quantise_rows.reference(act_and_mul.reference(gate_up, activation), group)
