"""Products with matrices in 4-bit and 8-bit groups. T tokens, K inputs, N outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from engine.formats.dense import Dense
from engine.formats.forms import IN_FLOATS, PLAIN, Added, InFp8, InputForm, Rows
from engine.formats.int8 import ROUNDED, Int8Linear
from engine.formats.product import Linear
from engine.kernels.activation import act_and_mul
from engine.kernels.device import use_triton
from engine.kernels.linear import packed
from engine.kernels.quantised import groups, tiles
from engine.kernels.quantised.fp8 import Fp8Rows
from engine.kernels.quantised.groups import Groups, narrow
from engine.kernels.quantised.int8 import MOST_INPUTS, multiplies_bytes, quantise
from engine.kernels.quantised.tiles import Tiles
from engine.weights.parameters import Placement, Weights

# Part of a model's fingerprint: another rounding of rows needs another name.
ROUNDED_IN_GROUPS = "rows of 8 bits in groups, middles taken off as whole numbers"


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
        return groups.linear(_ordered(x, self.order), self.weight, self.bias, out=out)

    def parts(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        if isinstance(x, Fp8Rows):
            return groups.product_of_rows(x.values, x.scale, self.weight, self.bias, partial=True)
        return groups.linear_parts(_ordered(x, self.order), self.weight, self.bias)

    def onto(self, residual: torch.Tensor, x: torch.Tensor | Fp8Rows) -> torch.Tensor | None:
        if isinstance(x, Fp8Rows):
            return self.parts(x)
        return groups.linear_onto(residual, _ordered(x, self.order), self.weight, self.bias)

    def gated(self, x: torch.Tensor | Fp8Rows, activation: str = "silu") -> torch.Tensor:
        if isinstance(x, Fp8Rows):
            return groups.gated_product_of_rows(x.values, x.scale, self.weight, self.bias, activation)
        return groups.gated_linear(_ordered(x, self.order), self.weight, self.bias, activation)

    def gated_as(self, form: InputForm, x: torch.Tensor | Fp8Rows, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))

    def narrow(self) -> None:
        """Keep the scales in 16 bits where that is exact."""
        self.weight = narrow(self.weight)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [N, K] with inputs in the original order."""
        matrix = groups.dequantised.reference(self.weight.codes, self.weight, dtype)
        return matrix if self.order is None else matrix[:, self.order.argsort()]


def takes_tiles(device: str, dtype: str) -> bool:
    """True if products on a device multiply tiles, and nobody asked for floats. `dtype`: "auto", or the one asked for."""
    return device == "cpu" and dtype in ("auto", "bfloat16") and tiles.is_usable()


def suits_tiles(place: Placement, group: int) -> bool:
    """True if a part of a module begins and ends between tiles, and between groups of inputs that share a scale."""
    rows, columns = next(each for each in place.target if isinstance(each, slice)), place.source[-1]
    is_whole = not (rows.start % tiles.OUTPUTS or columns.start % tiles.OF_ROWS)
    return is_whole and tiles.suit(rows.stop - rows.start, columns.stop - columns.start, group)


def cut_within(name: str) -> ValueError:
    """The error for experts that ranks would cut within their format's groups or tiles."""
    return ValueError(
        f"{name}: ranks can't cut it between groups and tiles of its inputs: take --enable-expert-parallel"
    )


def allocate_tiles(shape: tuple[int, ...], weights: Weights, *, bits: int, group: int, has_minimums: bool) -> Tiles:
    """Return memory for a matrix [..., N, K], whose products the model's fingerprint names."""
    weights.differing[ROUNDED_IN_GROUPS] += 1
    return tiles.allocate(*shape, bits=bits, group=group, has_minimums=has_minimums, device=weights.device)


@dataclass(slots=True)
class TiledLinear:
    """A product with a matrix in tiles. Rows are quantised by the kernel."""

    weight: Tiles
    bias: torch.Tensor | None = None  # [N]
    order: torch.Tensor | None = None  # [K] permutation of the inputs; None: identity

    def widen(self) -> None:
        """Keep the loaded bias in float32, which the kernel adds, with zeros for spare outputs."""
        if self.bias is not None:
            self.bias = pad(self.bias.float(), (0, self.weight.outputs - len(self.bias)))

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return IN_FLOATS

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        x = _ordered(x, self.order)
        if out is not None and out.dtype == torch.float32 and out.stride(-1) == 1:
            return tiles.product(x, self.weight, self.bias, out=out)
        found = tiles.product(x, self.weight, self.bias)
        return found.to(x.dtype) if out is None else out.copy_(found)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        x = _ordered(x, self.order)
        if residual.dtype == torch.float32 and residual.stride(-1) == 1:
            tiles.product(x, self.weight, self.bias, out=residual, adds=True)
        else:
            residual.add_(tiles.product(x, self.weight, self.bias))
        return None

    def gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        x = _ordered(x, self.order)
        if activation in tiles.GATES and self.weight.outputs % (2 * tiles.OUTPUTS) == 0:
            return tiles.gated_product(x, self.weight, self.bias, activation).to(x.dtype)
        return act_and_mul.reference(tiles.product(x, self.weight, self.bias), activation).to(x.dtype)

    def gated_as(self, form: InputForm, x: torch.Tensor, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))


def _ordered(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return x if order is None else x.index_select(1, order)


@dataclass(slots=True)
class WhenLoaded:
    """A product on a CPU with groups that don't become tiles: they are converted once loaded."""

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


def serving(grouped: Grouped | TiledLinear, weights: Weights) -> Linear:
    """Return the product for a matrix in groups, once it is loaded."""
    if isinstance(grouped, TiledLinear):
        weights.when_loaded.append(grouped.widen)
        return grouped
    if use_triton(grouped.weight.codes):
        weights.when_loaded.append(grouped.narrow)
        return grouped
    in_rows = weights.dtype == torch.bfloat16 and multiplies_bytes() and grouped.weight.inputs <= MOST_INPUTS
    if in_rows:
        weights.differing[ROUNDED] += 1
    product = WhenLoaded(grouped, weights.dtype, in_rows)
    weights.when_loaded.append(product.prepare)
    return product
