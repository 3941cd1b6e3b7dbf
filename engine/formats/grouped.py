"""Products with matrices in 4-bit and 8-bit groups. T tokens, K inputs, N outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.formats.dense import Dense
from engine.formats.forms import PLAIN, Added, InFp8, InputForm, Rows
from engine.formats.int8 import ROUNDED, Int8Linear
from engine.formats.product import Linear
from engine.kernels.device import use_triton
from engine.kernels.linear import packed
from engine.kernels.quantised import groups
from engine.kernels.quantised.fp8 import Fp8Rows
from engine.kernels.quantised.groups import Groups, narrow
from engine.kernels.quantised.int8 import MOST_INPUTS, multiplies_bytes, quantise
from engine.weights.parameters import Weights


@dataclass(slots=True)
class Grouped:
    """A weight in groups."""

    weight: Groups
    bias: torch.Tensor | None = None  # [N]
    order: torch.Tensor | None = None  # [K] permutation of the inputs; None: identity

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        """Quantised rows where a kernel takes them, unless the inputs are permuted."""
        rounding = groups.rounding_of(self.weight, num_rows, dtype) if self.order is None else None
        return PLAIN if rounding is None else InFp8(rounding)

    def __call__(self, x: torch.Tensor | Fp8Rows, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, Fp8Rows):
            return groups.product_of_rows(x.values, x.scale, self.weight, self.bias)
        return groups.linear(self._ordered(x), self.weight, self.bias, out=out)

    def parts(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        if isinstance(x, Fp8Rows):
            return groups.product_of_rows(x.values, x.scale, self.weight, self.bias, partial=True)
        return groups.linear_parts(self._ordered(x), self.weight, self.bias)

    def onto(self, residual: torch.Tensor, x: torch.Tensor | Fp8Rows) -> torch.Tensor | None:
        if isinstance(x, Fp8Rows):
            return self.parts(x)
        return groups.linear_onto(residual, self._ordered(x), self.weight, self.bias)

    def gated(self, x: torch.Tensor | Fp8Rows, activation: str = "silu") -> torch.Tensor:
        if isinstance(x, Fp8Rows):
            return groups.gated_product_of_rows(x.values, x.scale, self.weight, self.bias, activation)
        return groups.gated_linear(self._ordered(x), self.weight, self.bias, activation)

    def gated_as(self, form: InputForm, x: torch.Tensor | Fp8Rows, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))

    def narrow(self) -> None:
        """Keep the scales in 16 bits where that is exact."""
        self.weight = narrow(self.weight)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [N, K] with inputs in the original order."""
        matrix = groups.dequantised.reference(self.weight.codes, self.weight, dtype)
        return matrix if self.order is None else matrix[:, self.order.argsort()]

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x.index_select(1, self.order)


@dataclass(slots=True)
class WhenLoaded:
    """A product on a CPU, which has no kernel for groups: they are converted once loaded."""

    loading: Grouped | None
    dtype: torch.dtype
    in_rows: bool  # converted to 8-bit rows, else to plain
    product: Linear = field(init=False)

    def prepare(self) -> None:
        """Release the packed groups: the prepared product replaces them."""
        assert self.loading is not None
        loading, self.loading = self.loading, None
        if self.in_rows:
            self.product = linear = Int8Linear(loading.bias)
            linear.put(quantise(loading.plain(torch.float32)))
        else:
            self.product = Dense(packed(loading.plain(self.dtype)), loading.bias)

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return self.product.wants(num_rows, dtype)

    def __call__(self, x: Rows, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.product(x, out=out)

    def parts(self, x: Rows) -> torch.Tensor:
        return self.product.parts(x)

    def onto(self, residual: torch.Tensor, x: Rows) -> Added:
        return self.product.onto(residual, x)

    def gated(self, x: Rows, activation: str = "silu") -> torch.Tensor:
        return self.product.gated(x, activation)

    def gated_as(self, form: InputForm, x: Rows, activation: str = "silu") -> Rows:
        return self.product.gated_as(form, x, activation)


def serving(grouped: Grouped, weights: Weights) -> Linear:
    """Return the product for a matrix in groups, once it is loaded."""
    if use_triton(grouped.weight.codes):
        weights.when_loaded.append(grouped.narrow)
        return grouped
    in_rows = weights.dtype == torch.bfloat16 and multiplies_bytes() and grouped.weight.inputs <= MOST_INPUTS
    if in_rows:
        weights.differing[ROUNDED] += 1
    product = WhenLoaded(grouped, weights.dtype, in_rows)
    weights.when_loaded.append(product.prepare)
    return product
