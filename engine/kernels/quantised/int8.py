"""Products with int8 weights on a CPU: each row of activations is quantised to 16 bits. T tokens, K inputs, N outputs.

A code of 16 bits is two of 8, each multiplied as a row of its own: with 8 bits alone a few large activations take the digits
of all others of their row. Whole numbers are added up exactly, so a row never depends on its batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear as torch_linear

from engine.kernels.activation import ACTIVATIONS
from engine.kernels.norm import inverse_rms
from engine.kernels.once import constant
from engine.processor import has_avx512

LARGEST = 127.0  # code of the largest weight
LARGEST_OF_A_ROW = 32639.0  # code of the largest activation: 127 * 256 + 127
ZERO = 128  # 8-bit code of zero in a row of activations
_HIGH = 256  # weight of the high code
_MIDDLE = ZERO * _HIGH + ZERO  # 16-bit code of zero
MOST_INPUTS = (1 << 31) // (255 * 127)  # inputs whose products always fit 32 bits
_TINY = 1e-30  # keeps the scale of a row of zeros finite
_SMALLEST_COLUMN = 1e-6  # keeps the scale of an empty column finite
_ELEMENTS_AT_ONCE = 1 << 17  # fit a core's cache as floats
_RESULTS_AT_ONCE = 1 << 20  # fit a larger cache
_FEWEST_ROWS = 64  # each slab reads the whole matrix
_CPU = torch.device("cpu")
_EXACT_INPUTS = 1024  # their products sum exactly in float32


@dataclass(frozen=True, slots=True)
class Int8:
    """A matrix [N, K]: each element is `scale * code * column`."""

    codes: torch.Tensor  # int8 [N, K]
    scales: torch.Tensor  # [N] float32
    columns: torch.Tensor  # [K] float32

    def part(self, rows: torch.Tensor, columns: slice) -> Int8:
        """Return some of its rows and columns."""
        if len(rows) == len(self.codes) and self.codes[:, columns].shape == self.codes.shape:
            return self
        return Int8(self.codes[rows, columns].contiguous(), self.scales[rows], self.columns[columns].clone())

    def floats(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return these rows [...] dequantised [..., K]."""
        return (self.codes[rows] * self.scales[rows].unsqueeze(-1)).mul_(self.columns).to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Product:
    """The matrix packed for `product` on this processor."""

    codes: torch.Tensor  # int8 [N, K], or in oneDNN's order
    steps: torch.Tensor  # [N] float32: value of one code step
    zeros: torch.Tensor  # [N] int64, as oneDNN requires
    columns: torch.Tensor  # [K] float32, applied to activations before quantising

    @classmethod
    def of(cls, matrix: Int8) -> Int8Product:
        codes = torch.ops.onednn.qlinear_prepack(matrix.codes, None) if multiplies_bytes() else matrix.codes
        return cls(codes, matrix.scales, torch.zeros(len(matrix.scales), dtype=torch.int64), matrix.columns)


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations [T, K]: each element is `step * (low - ZERO + _HIGH * (high - ZERO))`."""

    codes: torch.Tensor  # uint8 [T, 2, K]: low codes, high codes
    steps: torch.Tensor  # float32 [T, 1]
    dtype: torch.dtype  # dtype of the results

    def are_few(self, weight: Int8Product) -> bool:
        """True if they fit one slab."""
        num_rows = self.codes.shape[0]
        return num_rows <= _FEWEST_ROWS or num_rows * _width(weight) <= _RESULTS_AT_ONCE

    def slabs(self, weight: Int8Product, results: torch.Tensor) -> Iterator[tuple[Int8Rows, torch.Tensor]]:
        """Split into slabs, with their rows of `results`, whose products stay in a cache."""
        if self.are_few(weight):
            yield self, results
            return
        num_rows, width = self.codes.shape[0], _width(weight)
        for rows in _slabs(num_rows, width, max(_RESULTS_AT_ONCE, _FEWEST_ROWS * width)):
            yield Int8Rows(self.codes[rows], self.steps[rows], self.dtype), results[rows]


def _width(weight: Int8Product) -> int:
    """Cache elements of a row, as codes or as products."""
    return 2 * max(len(weight.columns), len(weight.steps))


@functools.cache
def multiplies_bytes() -> bool:
    """True if oneDNN multiplies bytes exactly here: without VNNI it may accumulate in 16 bits."""
    has_vnni = has_avx512() and getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    return bool(has_vnni) and hasattr(torch.ops.onednn, "qlinear_pointwise")


def quantise(weight: torch.Tensor) -> Int8:
    """Quantise a weight [N, K], with a scale for each output and each input. Raises ValueError if K is more than `MOST_INPUTS`.

    Inputs whose weights are small next to their rows' largest keep as many digits as the others so.
    """
    if weight.shape[1] > MOST_INPUTS:
        raise ValueError(f"a product of {weight.shape[1]} inputs: int8 takes {MOST_INPUTS} at most; load without it")
    codes, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    columns = torch.full(weight.shape[1:], _SMALLEST_COLUMN)
    for rows in _slabs(*weight.shape):
        size = weight[rows].abs().float()
        columns = torch.maximum(columns, size.div_(size.amax(1, True).clamp_(min=_TINY)).amax(0))
    for rows in _slabs(*weight.shape):
        wide = weight[rows] / columns
        scales[rows] = wide.abs().amax(dim=1).clamp_(min=_TINY) / LARGEST
        codes[rows] = wide.div_(scales[rows, None]).round_()
    return Int8(codes, scales, columns)


def product(
    x: torch.Tensor, weight: Int8Product, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias [T, N] in x's dtype, in `out` if it is given. `x` [T, K], `bias` [N]."""
    return product_of_rows(quantised(x.float() * weight.columns, x.dtype), weight, bias, out=out)


def product_of_rows(
    rows: Int8Rows, weight: Int8Product, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`product` of quantised rows."""
    if out is None and rows.are_few(weight):
        return _numbers(rows, weight, bias).to(rows.dtype)
    if out is None:
        out = torch.empty(rows.codes.shape[0], weight.steps.shape[0], dtype=rows.dtype)
    for some, place in rows.slabs(weight, out):
        place.copy_(_numbers(some, weight, bias))
    return out


def product_onto(residual: torch.Tensor, rows: Int8Rows, weight: Int8Product, bias: torch.Tensor | None) -> None:
    """Add the product to `residual` [T, N], rounding once."""
    for some, place in rows.slabs(weight, residual):
        place.add_(_numbers(some, weight, bias))


def gated_rows(
    rows: Int8Rows, gate_up: Int8Product, bias: torch.Tensor | None, activation: str, columns: torch.Tensor
) -> Int8Rows:
    """Return act(x @ gate.T) * (x @ up.T) * columns, quantised, of the rows x; see `linear.gated_linear`. `columns` [I]."""
    act, found = ACTIVATIONS[activation], list[Int8Rows]()
    for some, _ in rows.slabs(gate_up, rows.codes):
        if bias is None:
            gate, up = _whole_numbers(some.codes, gate_up).chunk(2, dim=-1)
            gated = quantised(act(gate.mul_(some.steps)).mul_(up).mul_(columns), rows.dtype)
            gated.steps.mul_(some.steps)  # the other half's scale, on which codes don't depend
        else:
            gate, up = _numbers(some, gate_up, bias).chunk(2, dim=-1)
            gated = quantised(act(gate).mul_(up).mul_(columns), rows.dtype)
        found.append(gated)
    if len(found) == 1:
        return found[0]
    return Int8Rows(torch.cat([each.codes for each in found]), torch.cat([each.steps for each in found]), rows.dtype)


def normed_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, columns: torch.Tensor, *, plus_one: bool
) -> Int8Rows:
    """Return rms_norm(x, weight) * columns [T, K], quantised: codes don't depend on the rms."""
    wide, factors = x.float(), weight.float()
    inverse = inverse_rms(wide, eps)
    rows = quantised(wide * ((1.0 + factors if plus_one else factors) * columns), x.dtype)
    rows.steps.mul_(inverse)
    return rows


def quantised(wide: torch.Tensor, dtype: torch.dtype) -> Int8Rows:
    """Quantise each row of `wide` [T, K] float32; its largest magnitude has the code `LARGEST_OF_A_ROW`."""
    steps = wide.abs().amax(1, True).mul_(constant(1 / LARGEST_OF_A_ROW, _CPU)).add_(constant(_TINY, _CPU))
    # Positive numbers are truncated when converted to integers.
    words = (wide * steps.reciprocal()).add_(constant(_MIDDLE + 0.5, _CPU)).to(torch.uint16)
    codes = words.view(torch.uint8).unflatten(1, (-1, 2)).transpose(1, 2).contiguous()
    return Int8Rows(codes, steps, dtype)


def _numbers(rows: Int8Rows, weight: Int8Product, bias: torch.Tensor | None) -> torch.Tensor:
    """The product [T, N] float32."""
    wide = _whole_numbers(rows.codes, weight).mul_(rows.steps)
    return wide if bias is None else wide.add_(bias)


def _whole_numbers(codes: torch.Tensor, weight: Int8Product) -> torch.Tensor:
    """The product of codes [T, 2, K], in steps [T, N] float32."""
    low, high = _halves(codes.flatten(0, 1), weight).unflatten(0, (-1, 2)).unbind(1)
    return torch.add(low, high, alpha=_HIGH)


def _halves(codes: torch.Tensor, weight: Int8Product) -> torch.Tensor:
    """The product of 8-bit codes [R, K], in steps [R, N] float32."""
    if not weight.codes.is_mkldnn:
        return exact_product(codes, weight.codes) * weight.steps
    result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, ZERO, weight.codes, weight.steps, weight.zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return result


def exact_product(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in float32, in slabs in which every sum is exact, accumulated in a fixed order. uint8 [T, K], int8 [N, K]."""
    signed = codes.float().sub_(ZERO)
    result = torch.zeros(len(codes), len(weight))
    for rows in _slabs(len(weight), _EXACT_INPUTS):
        for begin in range(0, weight.shape[1], _EXACT_INPUTS):
            some = slice(begin, begin + _EXACT_INPUTS)
            result[:, rows] += torch_linear(signed[:, some], weight[rows, some].float())
    return result


def _slabs(num_rows: int, width: int, elements: int = _ELEMENTS_AT_ONCE) -> Iterator[slice]:
    """Runs of rows with about this many elements."""
    count = max(1, elements // width)
    return (slice(begin, begin + count) for begin in range(0, num_rows, count))
