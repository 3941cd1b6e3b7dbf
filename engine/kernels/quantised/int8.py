"""Products with 8-bit weights on a CPU: each row of activations is quantised by itself. T tokens, K inputs, N outputs.

Codes are multiplied as whole numbers and added up exactly, so a row never depends on its batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear as torch_linear

LARGEST = 127.0  # a code's magnitude
ZERO = 128  # a zero's code in a row of activations
MOST_INPUTS = (1 << 31) // (255 * 127)  # whose products always add up within 32 bits
_TINY = 1e-30  # keeps the scale of a row of zeros finite
_ELEMENTS_AT_ONCE = 1 << 17  # stay in a core's cache as floats
_RESULTS_AT_ONCE = 1 << 20  # stay in a larger cache
_EXACT_INPUTS = 1024  # their products add up exactly in float32


@dataclass(frozen=True, slots=True)
class Int8:
    """A matrix [N, K]: each element is `scale * code`."""

    codes: torch.Tensor  # int8 [N, K]
    scales: torch.Tensor  # [N] float32

    def floats(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return these rows [...] as numbers [..., K]."""
        return (self.codes[rows] * self.scales[rows].unsqueeze(-1)).to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Product:
    """The matrix as `product` reads it fastest on this processor."""

    codes: torch.Tensor  # int8 [N, K], or in oneDNN's order
    steps: torch.Tensor  # [N] float32: worth of two codes' product
    zeros: torch.Tensor  # [N] int64, as oneDNN asks for them

    @classmethod
    def of(cls, matrix: Int8) -> Int8Product:
        codes = torch.ops.onednn.qlinear_prepack(matrix.codes, None) if multiplies_bytes() else matrix.codes
        return cls(codes, matrix.scales / LARGEST, torch.zeros(len(matrix.scales), dtype=torch.int64))


@functools.cache
def multiplies_bytes() -> bool:
    """Whether oneDNN multiplies bytes exactly here: without VNNI it may add up in 16 bits."""
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    return bool(has_vnni) and hasattr(torch.ops.onednn, "qlinear_pointwise")


def quantise(weight: torch.Tensor) -> Int8:
    """Round a weight [N, K], with a scale for each output. Raises ValueError if K is more than `MOST_INPUTS`."""
    if weight.shape[1] > MOST_INPUTS:
        raise ValueError(f"a product of {weight.shape[1]} inputs: int8 takes {MOST_INPUTS} at most; load without it")
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for rows in _slabs(*weight.shape):
        wide = weight[rows].float()
        scales[rows] = wide.abs().amax(dim=1).clamp_(min=_TINY) / LARGEST
        codes[rows] = (wide / scales[rows, None]).round_()
    return Int8(codes, scales)


def product(
    x: torch.Tensor, weight: Int8Product, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N] in x's dtype, in `out` if it is given. `x` [T, K], `bias` [N]."""
    num_outputs = len(weight.steps)
    if out is None:
        out = x.new_empty(len(x), num_outputs)
    if len(x) * max(x.shape[1], num_outputs) <= _RESULTS_AT_ONCE:
        return _product(x, weight, bias, out)
    for rows in _slabs(len(x), max(x.shape[1], num_outputs), _RESULTS_AT_ONCE):
        _product(x[rows], weight, bias, out[rows])
    return out


def _product(x: torch.Tensor, weight: Int8Product, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    codes, largest = rows_quantised(x)
    wide = _whole_numbers(codes, weight)
    return torch.mul(wide, largest, out=out) if bias is None else torch.addcmul(bias, wide, largest, out=out)


def rows_quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [T, K] around `ZERO`, and each row's largest magnitude [T, 1] float32, which has the code 127."""
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY)
    # Positive numbers are cut off on their way to bytes.
    return (wide * (LARGEST / largest)).add_(ZERO + 0.5).to(torch.uint8), largest


def _whole_numbers(codes: torch.Tensor, weight: Int8Product) -> torch.Tensor:
    """The product of codes, in steps [T, N] float32."""
    if not weight.codes.is_mkldnn:
        return exact_product(codes, weight.codes) * weight.steps
    result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, ZERO, weight.codes, weight.steps, weight.zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return result


def exact_product(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in float32, in slabs in which every sum is exact; they are added up in one order. uint8 [T, K], int8 [N, K]."""
    signed = codes.float().sub_(ZERO)
    result = torch.zeros(len(codes), len(weight))
    for rows in _slabs(len(weight), _EXACT_INPUTS):
        for begin in range(0, weight.shape[1], _EXACT_INPUTS):
            some = slice(begin, begin + _EXACT_INPUTS)
            result[:, rows] += torch_linear(signed[:, some], weight[rows, some].float())
    return result


def _slabs(num_rows: int, width: int, elements: int = _ELEMENTS_AT_ONCE) -> Iterator[slice]:
    """Runs of rows with about this number of elements."""
    count = max(1, elements // width)
    return (slice(begin, begin + count) for begin in range(0, num_rows, count))
