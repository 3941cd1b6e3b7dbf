"""Products with matrices of any format, and embedding tables. T tokens, K inputs, N outputs, E experts, P partial sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import groupby
from typing import Any, Protocol

import torch

from engine.formats.forms import IN_FLOATS, PLAIN, Added, InputForm, Rows
from engine.kernels.activation import act_and_mul
from engine.kernels.embedding import InputTokens
from engine.kernels.experts.mixture import Matrices
from engine.weights.parameters import Parameter, Part, Shard, Weights, of_experts, stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A product [T, K] -> [T, N] with the stacked matrices of several modules of the checkpoint."""

    inputs: int
    outputs: Mapping[str, int]  # by module
    bias: bool
    shard: Shard
    unit: int = 1  # outputs or inputs that ranks don't split
    fused: str = ""  # one module with the rows of all `outputs`
    twice: Mapping[str, str] = field(default_factory=dict)  # module -> another one with the same rows

    @property
    def size(self) -> int:
        return sum(self.outputs.values())

    def module(self, output: str) -> str:
        """The checkpoint's module with the rows of an output."""
        return self.fused or self.twice.get(output, output)

    def only(self, outputs: list[str]) -> LinearSpec:
        """The same product with some of the outputs."""
        return replace(self, outputs={name: self.outputs[name] for name in outputs})

    def parts(self, kind: str) -> tuple[Part, ...]:
        """The rows of each module's tensor `kind` in the stack."""
        parts = stacked(self.outputs)
        if self.fused:
            name, size = f"{self.fused}.{kind}", self.size
            return tuple(replace(part, name=name, stored=part.rows, of=size) for part in parts)
        return tuple(replace(part, name=f"{self.module(part.name)}.{kind}") for part in parts)

    def parameter(self, kind: str = "weight", dtype: torch.dtype | None = None) -> Parameter:
        """The stack [N, K] of the modules' tensors of one kind."""
        shape = (self.size, self.inputs)
        return Parameter(shape=shape, parts=self.parts(kind), shard=self.shard, unit=self.unit, format=dtype)

    def by_tensor(self) -> Iterator[Parameter]:
        """The rows of the stack in each of the checkpoint's `weight`s, in order."""
        for _, parts in groupby(self.parts("weight"), key=lambda part: part.name):
            own = tuple(parts)
            rows = sum(part.rows.stop - part.rows.start for part in own)
            yield replace(self.parameter(), shape=(rows, self.inputs), parts=own)


class Order(Enum):
    """The memory order of a checkpoint's tensor of all experts. E experts, H hidden size, I intermediate size.

    Interleaved, each of the gate's columns stands before its column of up.
    """

    ROWS = auto()  # [E, 2 I, H] and [E, H, I]
    COLUMNS = auto()  # [E, H, 2 I] and [E, I, H]
    INTERLEAVED_COLUMNS = auto()
    ROWS_OR_COLUMNS = auto()  # told by the shapes in the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The matrices [E, N, K] of one product of all experts."""

    num_experts: int
    rows: int  # N
    inputs: int  # K
    each: tuple[str, ...]  # modules of expert `{}`, with their rows in sequence; (): none
    together: tuple[str, ...]  # or one of these tensors has all experts
    order: Order
    halves: bool  # the gate's rows precede those of up
    shard: Shard = Shard.EXPERTS

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.num_experts, self.rows, self.inputs)

    @property
    def size_of_each(self) -> tuple[int, int]:
        """The rows and inputs of one of `each`."""
        return (self.rows // len(self.each), self.inputs)

    @property
    def modules(self) -> tuple[str, ...]:
        """Some modules that have the format of all."""
        return tuple(name.format(0) for name in self.each) or self.together

    def parameter(self) -> Parameter:
        """The matrices as one parameter, however the checkpoint stores them."""
        if self.shard is Shard.EXPERTS:
            return of_experts("", *self.shape)
        rows, _ = self.size_of_each
        parts = (
            Part(name=module.format(expert), rows=slice(at * rows, (at + 1) * rows), expert=expert)
            for expert in range(self.num_experts)
            for at, module in enumerate(self.each)
        )
        return Parameter(shape=self.shape, parts=tuple(parts), shard=self.shard)


class Linear(Protocol):
    """A product with a weight of any format. `x` are plain rows [T, K], or rows in the form that it wants for so many."""

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        """The fastest input form for so many rows of activations in `dtype`."""
        ...

    def __call__(self, x: Rows, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product [T, N], in `out` if it is given, for which rows are plain."""
        ...

    def parts(self, x: Rows) -> torch.Tensor:
        """Return the product, or partial sums [P, T, N] for a kernel that adds them as it reads."""
        ...

    def onto(self, residual: torch.Tensor, x: Rows) -> Added:
        """Add the product to `residual` [T, N] in place and return None, or leave it and return what is to be added."""
        ...

    def gated(self, x: Rows, activation: str = "silu") -> torch.Tensor:
        """Return act(first half) * second half of the product, [T, N / 2]; "silu" or "gelu_tanh"."""
        ...

    def gated_as(self, form: InputForm, x: Rows, activation: str = "silu") -> Rows:
        """Return `gated` in the form that the next product wants."""
        ...


class Format(Protocol):
    """The storage format of a checkpoint's matrices: declares the tensors of one product. A frozen, comparable value."""

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear | KeptWhole:
        """Declare a product of modules below the prefix `under`, or a whole one though ranks share its inputs."""
        ...

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        """Declare a matrix [N, K] that the model needs in the compute dtype."""
        ...

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> Matrices:
        """Declare the matrices [E, N, K] of all experts."""
        ...


def declare_bias(spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor | None:
    """Declare the modules' `bias` [N], if they have any. The first of the ranks that share the inputs adds it, for all."""
    if not spec.bias:
        return None
    if spec.shard is Shard.INPUTS and weights.rank:
        weights.unused |= {under + part.name for part in spec.parts("bias")}
        return None
    shard = Shard.NONE if spec.shard is Shard.INPUTS else spec.shard
    return weights.new(
        Parameter(shape=(spec.size,), parts=spec.parts("bias"), shard=shard, unit=spec.unit), under=under
    )


@dataclass(frozen=True, slots=True)
class KeptWhole:
    """A product that each rank has whole: there is no border of its format where ranks would part the inputs."""

    linear: Linear


class ByItsResult:
    """A product whose other forms take its plain result."""

    __slots__ = ()

    def __call__(self, x: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError

    def parts(self, x: Any) -> torch.Tensor:
        return self(x)

    def onto(self, residual: torch.Tensor, x: Any) -> Added:
        return self(x)

    def gated(self, x: Any, activation: str = "silu") -> torch.Tensor:
        return act_and_mul(self(x), activation)

    def gated_as(self, form: InputForm, x: Any, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))


@dataclass(frozen=True, slots=True)
class OwnOutputs(ByItsResult):
    """Some outputs of a product that this rank has whole: there is no border of its format between ranks' outputs."""

    whole: Linear
    outputs: torch.Tensor  # [n], their numbers

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return self.whole.wants(num_rows, dtype)

    def __call__(self, x: Rows, *, out: torch.Tensor | None = None) -> torch.Tensor:
        own = self.whole(x).index_select(1, self.outputs)
        return own if out is None else out.copy_(own)


@dataclass(frozen=True, slots=True)
class SideBySide(ByItsResult):
    """Products of the same inputs: a stack of modules with different formats."""

    linears: tuple[Linear, ...]

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        """Unquantised rows: each product of them may have a form of its own."""
        own = {linear.wants(num_rows, dtype) for linear in self.linears}
        return IN_FLOATS if own == {IN_FLOATS} else PLAIN

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1, out=out)


def declare(
    spec: LinearSpec, format_of: Callable[[str], Format], weights: Weights, *, under: str
) -> Linear | KeptWhole:
    """Declare a product: one of all outputs, or one for each run of modules with the same format."""
    groups = [
        (format, list(outputs))
        for format, outputs in groupby(spec.outputs, key=lambda output: format_of(under + spec.module(output)))
    ]
    if len(groups) == 1:
        return groups[0][0].linear(spec, weights, under=under)
    return SideBySide(
        tuple(as_product(format.linear(spec.only(some), weights, under=under)) for format, some in groups)
    )


def as_product(linear: Linear | KeptWhole) -> Linear:
    """Return a declared product whose inputs no ranks share."""
    assert not isinstance(linear, KeptWhole), "ranks share its inputs"
    return linear


def kept_whole(format: Format, spec: LinearSpec, weights: Weights, *, under: str) -> Linear | KeptWhole:
    """Declare a product whole on every rank that shares it."""
    return own_of(format.linear(replace(spec, shard=Shard.NONE), weights, under=under), spec, weights)


def own_of(whole: Linear | KeptWhole, spec: LinearSpec, weights: Weights) -> Linear | KeptWhole:
    """Return a rank's product out of the whole one: all its inputs, or this rank's outputs."""
    linear = as_product(whole)
    return KeptWhole(linear) if spec.shard is Shard.INPUTS else OwnOutputs(linear, weights.own(spec.parameter())[0])


class Table(Protocol):
    """A row of features for each token."""

    def rows(self, tokens: InputTokens) -> torch.Tensor:
        """Return [T, E], see `embed`."""
        ...

    def head(self, bias: torch.Tensor | None, weights: Weights) -> Linear:
        """Return the product [T, E] -> [T, V] with the table and a bias [V]."""
        ...


class TableFormat(Protocol):
    """The storage format of a table. A frozen value."""

    def declare(self, parameter: Parameter, weights: Weights) -> Table: ...
