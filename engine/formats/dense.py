"""Matrices and embedding tables of floats: in the compute dtype, or in 16 bits. T tokens, K inputs, N outputs, E experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.formats.forms import IN_FLOATS, PLAIN, InputForm, Rows
from engine.formats.product import ExpertsSpec, Linear, LinearSpec, Order, Table, TableFormat, declare_bias
from engine.kernels.activation import act_and_mul
from engine.kernels.embedding import InputTokens, embed
from engine.kernels.linear import gated_linear, linear, linear_onto, linear_parts, packed
from engine.kernels.native import halves
from engine.kernels.native.halves import Halves
from engine.weights.parameters import Parameter, Part, Shard, Way, Weights, of_experts


@dataclass(slots=True)
class Dense:
    """A weight in the compute dtype."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None = None  # [N]

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return PLAIN

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, self.weight, self.bias, out=out)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return linear_parts(x, self.weight, self.bias)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        return linear_onto(residual, x, self.weight, self.bias)

    def gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return gated_linear(x, self.weight, self.bias, activation)

    def gated_as(self, form: InputForm, x: torch.Tensor, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))

    def pack(self) -> None:
        """Repack the loaded weight for the fastest GEMM."""
        self.weight = packed(self.weight)


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """`weight` and `bias` of each module, converted while loading."""

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
        dense = Dense(self.matrix(spec, weights, under=under), declare_bias(spec, weights, under=under))
        weights.when_loaded.append(dense.pack)
        return dense

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return weights.new(spec.parameter(), under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return weights.new(spec.parameter(), ways=ways_of(spec), under=under)


DENSE = DenseFormat()


def ways_of(spec: ExpertsSpec) -> list[Way]:
    """Forms in which a checkpoint stores experts' plain matrices: separate, or all in one tensor."""
    if spec.shard is not Shard.EXPERTS:
        return [
            replace(
                way := one_by_one(spec.each, "weight", spec.shape), parameter=replace(way.parameter, shard=spec.shard)
            )
        ]
    ways = [together(name, spec.shape, spec.order, halves=spec.halves) for name in spec.together]
    if spec.each:
        ways.insert(0, one_by_one(spec.each, "weight", spec.shape))
    return ways


def one_by_one(each: tuple[str, ...], kind: str, shape: tuple[int, ...]) -> Way:
    """Separate tensors of each expert's modules, with their rows in sequence."""
    parts = tuple(
        Part(name=f"{module}.{kind}", rows=rows, expert=expert)
        for expert in range(shape[0])
        for module, rows in _rows(each, shape[1], expert)
    )
    return Way(Parameter(shape=shape, parts=parts, shard=Shard.EXPERTS))


def rows_of_each(spec: ExpertsSpec, expert: int) -> list[tuple[str, slice]]:
    """The modules of one expert, and their rows in its matrix."""
    return _rows(spec.each, spec.rows, expert)


def _rows(each: tuple[str, ...], all_rows: int, expert: int) -> list[tuple[str, slice]]:
    rows = all_rows // len(each)
    return [(module.format(expert), slice(at * rows, (at + 1) * rows)) for at, module in enumerate(each)]


def together(name: str, shape: tuple[int, ...], order: Order, *, halves: bool) -> Way:
    """One tensor with all experts."""
    if order is Order.ROWS_OR_COLUMNS:
        rows, columns = (together(name, shape, each, halves=halves) for each in (Order.ROWS, Order.COLUMNS))
        return replace(rows, transposed=columns)
    num_experts, *matrix = shape
    swapped = len(matrix) == 2 and order is not Order.ROWS
    stored = (num_experts, *(reversed(matrix) if swapped else matrix))

    def seen(share: torch.Tensor) -> torch.Tensor:
        if halves and order is Order.INTERLEAVED_COLUMNS:
            share = share.unflatten(1, (2, -1)).movedim(1, -1)  # [E, I, H, 2], or [E, I, 2] of biases
        return share.transpose(1, 2) if swapped else share

    return Way(of_experts(name, *stored), seen)


@dataclass(frozen=True, slots=True)
class PlainTable:
    weight: torch.Tensor  # [V, E]

    def rows(self, tokens: InputTokens) -> torch.Tensor:
        return embed(self.weight, tokens)

    def head(self, bias: torch.Tensor | None, weights: Weights) -> Linear:
        dense = Dense(self.weight, bias)
        weights.when_loaded.append(dense.pack)
        return dense


@dataclass(frozen=True, slots=True)
class PlainTables:
    """Tables in the compute dtype."""

    def declare(self, parameter: Parameter, weights: Weights) -> Table:
        return PlainTable(weights.new(parameter))


PLAIN_TABLES = PlainTables()


@dataclass(frozen=True, slots=True)
class HalvesLinear:
    """A product with a matrix of 16-bit floats, once that is in order, summed in float32."""

    weight: Halves
    bias: torch.Tensor | None = None  # [N]

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return IN_FLOATS

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None or (out.dtype == torch.float32 and out.stride(-1) == 1):
            return halves.product(x, self.weight, self.bias, out=out)
        return out.copy_(halves.product(x, self.weight, self.bias))

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        halves.product(x, self.weight, self.bias, out=residual, adds=True)
        return None

    def gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return act_and_mul.reference(self(x), activation)

    def gated_as(self, form: InputForm, x: torch.Tensor, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))


@dataclass(frozen=True, slots=True)
class HalvesFormat:
    """`weight` of each module, and experts, in the 16 bits that the checkpoint has, `bias` in float32."""

    dtype: torch.dtype
    in_pairs: bool = False

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
        if weights.dtype != torch.float32:
            return DENSE.linear(spec, weights, under=under)
        weight = self.declare(spec.parameter(), weights, under=under)
        return HalvesLinear(weight, declare_bias(spec, weights, under=under))

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.matrix(spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor | Halves:
        if weights.dtype != torch.float32:
            return DENSE.experts(spec, weights, under=under)
        return self.declare(spec.parameter(), weights, ways=ways_of(spec), under=under)

    def declare(self, parameter: Parameter, weights: Weights, *, ways: Sequence[Way] = (), under: str = "") -> Halves:
        """Declare a matrix, or those of experts, which are put in order once loaded."""
        weight = weights.new(replace(parameter, format=self.dtype), ways=ways, under=under)
        weights.when_loaded.append(lambda: _put_in_order(weight, self.in_pairs))
        return Halves(panels=weight, in_pairs=self.in_pairs)


@dataclass(frozen=True, slots=True)
class HalvesTable:
    """An embedding of 16-bit floats, whose memory a tied head shares."""

    weight: Halves

    def rows(self, tokens: InputTokens) -> torch.Tensor:
        return self.weight.rows(tokens.ids())

    def head(self, bias: torch.Tensor | None, weights: Weights) -> Linear:
        return HalvesLinear(self.weight, bias)


@dataclass(frozen=True, slots=True)
class HalvesTables:
    """Tables in the 16 bits that the checkpoint has; others in another format."""

    plain: PlainModules
    others: TableFormat = PLAIN_TABLES

    def declare(self, parameter: Parameter, weights: Weights) -> Table:
        names = weights.stored.theirs(parameter.parts[0].name.removesuffix(".weight"))
        format = self.plain.format_of(names)
        if format is None or len(parameter.parts) > 1 or weights.dtype != torch.float32:
            return self.others.declare(parameter, weights)
        return HalvesTable(format.declare(parameter, weights))


@dataclass(frozen=True, slots=True)
class PlainModules:
    """Modules whose matrices a checkpoint has as 16-bit floats, by their names there."""

    named: tuple[tuple[torch.dtype, frozenset[str]], ...]
    in_pairs: bool = False  # those of bfloat16 are multiplied by rows of it

    @classmethod
    def of(cls, dtypes: Mapping[str, torch.dtype], *, in_pairs: bool = False) -> PlainModules:
        """Those of a module's dtype each; others are left out."""
        found = {dtype: frozenset(name for name, own in dtypes.items() if own is dtype) for dtype in halves.DTYPES}
        return cls(tuple((dtype, names) for dtype, names in found.items() if names), in_pairs)

    def format_of(self, names: list[str]) -> HalvesFormat | None:
        """The format of a module with one of these names."""
        found = (dtype for dtype, named in self.named if not named.isdisjoint(names))
        dtype = next(found, None)
        return None if dtype is None else HalvesFormat(dtype, self.in_pairs and dtype == torch.bfloat16)


NO_MODULES = PlainModules(())


def _put_in_order(weight: torch.Tensor, in_pairs: bool) -> None:
    for each in weight.view(-1, *weight.shape[-2:]):
        halves.packed(each, in_pairs=in_pairs)
