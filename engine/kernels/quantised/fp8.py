"""Products with fp8 weights. T tokens, K inputs, N outputs, I intermediate size, P partial sums.

On a GPU the tensor cores multiply 8 bits by 8 bits. Each of many rows is rounded. Each of few becomes several 8-bit floats that
add up to it: a number of 16 bits has 8 or 11 significant ones, an e4m3 has 4 (docs/design/quantised-gemm.md). The plain versions
here multiply the weights that the bits stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear as torch_linear

from engine.kernels.activation import act_and_mul
from engine.kernels.device import twin, use_triton
from engine.kernels.norm import add_and_norm, rms_norm

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1e-12  # avoids dividing zeros by zero
FEW_ROWS = 64  # fewer rows are multiplied exactly
GROUPS = (128, 64)  # inputs of few rows that share a scale
PARTS = {torch.bfloat16: 2, torch.float16: 3}  # parts that sum to a number
# Exponents of a group's largest element: in its scale, and in itself.
PART_EXPONENT = 7
EXPONENTS = (-111, 113)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [N, K]: e4m3 times a scale for each row, or for each block of rows and inputs. Or one for each expert."""

    weight: torch.Tensor  # [..., N, K] e4m3
    scale: torch.Tensor  # float32 [..., N], or [..., blocks of N, of K]
    block: tuple[int, int] | None = None  # rows, inputs

    def __getitem__(self, expert: int) -> Fp8Matrix:
        return Fp8Matrix(self.weight[expert], self.scale[expert], self.block)

    def plain(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix in another float dtype."""
        wide = self.weight.float()
        if self.block is None:
            return wide.mul_(self.scale[:, None]).to(dtype)
        scale = self.scale.repeat_interleave(self.block[0], 0)[: len(wide)]
        return wide.mul_(scale.repeat_interleave(self.block[1], 1)[:, : wide.shape[1]]).to(dtype)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The quantisation of activations to fp8: how many parts sum to a number. With several, scales are powers of 2.

    `for_codes`, of 4 bits: a group's inputs are in the order of their bytes (`in_bytes`), and its sum is kept.
    """

    group: int | None = None  # inputs that share a scale; None: the whole row
    parts: int = 1
    for_codes: bool = False

    def shape(self, num_rows: int, num_inputs: int) -> tuple[int, ...]:
        return (num_rows, num_inputs) if self.parts == 1 else (num_rows, self.parts, num_inputs)

    def shape_of_scales(self, num_rows: int, num_inputs: int) -> tuple[int, ...]:
        groups = num_inputs // (self.group or num_inputs)
        return (2, groups, num_rows) if self.for_codes else (num_rows, groups)


TO_ROWS = Rounding()


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations [T, K]: e4m3 times a scale for each row, or for each group of inputs in it.

    For codes scales are [2, K / group, T], sums behind scales.
    """

    values: torch.Tensor  # [T, K] e4m3, or [T, parts, K]
    scale: torch.Tensor  # float32 [T, 1] or [T, K / group]
    dtype: torch.dtype  # dtype of the results

    def __len__(self) -> int:
        return len(self.values)


def rounding_of(matrix: Fp8Matrix, num_rows: int, dtype: torch.dtype) -> Rounding:
    """The quantisation of so many rows for their product with a matrix [N, K]."""
    num_inputs = matrix.weight.shape[-1]
    block = num_inputs if matrix.block is None else matrix.block[1]
    if num_rows <= FEW_ROWS and dtype in PARTS:
        for group in GROUPS:
            if num_inputs % group == 0 and block % group == 0:
                return Rounding(group, PARTS[dtype])
    return Rounding(None if matrix.block is None else block)


def multiplies_fp8(device: torch.device) -> bool:
    """True if fp8 kernels run there: on GPUs since 2022 (compute capability 8.9)."""
    if device.type != "cuda":
        return use_triton(torch.empty(0, device=device))
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
    """Like `product`, or partial sums [P, T, N] float32 that the next kernel adds as it reads."""
    return torch_linear(x, matrix.plain(x.dtype), bias)


@twin("engine.kernels.quantised.triton_fp8")
def gated_product(
    x: torch.Tensor, gate_up: Fp8Matrix, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """Return act(x @ gate.T) * (x @ up.T) [T, I]. `gate_up` holds the gate's rows first. "silu" or "gelu_tanh"."""
    return act_and_mul.reference(torch_linear(x, gate_up.plain(x.dtype), bias), activation)


@twin("engine.kernels.quantised.triton_fp8_rows")
def quantise_rows(x: torch.Tensor, rounding: Rounding = TO_ROWS) -> Fp8Rows:
    """Quantise rows [T, K], where K is a multiple of the group."""
    wide = (in_bytes(x) if rounding.for_codes else x).float().unflatten(-1, (-1, rounding.group or x.shape[-1]))
    largest = wide.abs().amax(dim=-1, keepdim=True)
    if rounding.parts == 1:
        scale = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
        values = (wide / scale).clamp(-LARGEST, LARGEST).to(FP8)
        return Fp8Rows(values.flatten(-2), scale.squeeze(-1), x.dtype)
    exponent = torch.frexp(largest).exponent.sub(1).clamp(*EXPONENTS).masked_fill(largest == 0, EXPONENTS[0])
    scale = torch.ldexp(torch.ones_like(largest), exponent - PART_EXPONENT)
    rest, parts = wide / scale, []
    for _ in range(rounding.parts):
        parts.append(rest.to(FP8))
        rest = rest - parts[-1].float()
    scale = scale.squeeze(-1)
    if rounding.for_codes:
        scale = torch.stack((scale.T, wide.sum(dim=-1).T))
    return Fp8Rows(torch.stack([part.flatten(-2) for part in parts], dim=1), scale, x.dtype)


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """Columns [..., K] in the byte order of `Groups`: four planes of 32 words, where a word has one of each."""
    return x.unflatten(-1, (-1, 4, 32)).transpose(-1, -2).flatten(-3)


@twin("engine.kernels.quantised.triton_fp8")
def product_of_rows(
    values: torch.Tensor,
    scale: torch.Tensor,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    partial: bool = False,
) -> torch.Tensor:
    """Return the product [T, N] of fp8 rows, the fields of `Fp8Rows`.

    `partial`: it may be partial sums as `product_parts` returns them.
    """
    return torch_linear(_plain(values, scale, dtype), matrix.plain(dtype), bias)


@twin("engine.kernels.quantised.triton_fp8")
def gated_product_of_rows(
    values: torch.Tensor,
    scale: torch.Tensor,
    gate_up: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    activation: str = "silu",
) -> torch.Tensor:
    """Return `gated_product` of fp8 rows."""
    return gated_product.reference(_plain(values, scale, dtype), gate_up, bias, activation)


@twin("engine.kernels.quantised.triton_fp8")
def rounded_gated_product(
    values: torch.Tensor,
    scale: torch.Tensor,
    gate_up: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    rounding: Rounding,
    activation: str = "silu",
) -> Fp8Rows:
    """Return `quantise_rows` of `gated_product_of_rows`."""
    product = gated_product.reference(_plain(values, scale, dtype), gate_up, bias, activation)
    return quantise_rows.reference(product, rounding)


def _plain(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows [T, K] in another float dtype."""
    wide = values.float() if values.dim() == 2 else values.float().sum(dim=1)
    return (wide.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).to(dtype)


@twin("engine.kernels.quantised.triton_fp8_rows")
def normed_rows(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding,
    *,
    plus_one: bool = False,
) -> tuple[Fp8Rows, torch.Tensor]:
    """Return `quantise_rows` of rms_norm(x + residual), and x + residual; see `norm.add_rms_norm`."""
    if x is None:
        normed = rms_norm.reference(residual, weight, eps, plus_one=plus_one)
        return quantise_rows.reference(normed, rounding), residual
    normed, total = add_and_norm.reference(x, residual, weight, eps, plus_one=plus_one)
    return quantise_rows.reference(normed, rounding), total


@twin("engine.kernels.quantised.triton_fp8_rows")
def gated_rows(gate_up: torch.Tensor, rounding: Rounding, activation: str = "silu") -> Fp8Rows:
    """Return `quantise_rows` of act(gate) * up for `gate_up` [T, 2 I], the two halves side by side."""
    return quantise_rows.reference(act_and_mul.reference(gate_up, activation), rounding)
