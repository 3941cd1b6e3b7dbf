"""Online int8: plain matrices quantised while loading, with a scale for each row and column, for CPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.formats.dense import DENSE
from engine.formats.forms import InInt8, InputForm, Rows
from engine.formats.product import ExpertsSpec, Linear, LinearSpec, Table, declare_bias
from engine.kernels.activation import act_and_mul
from engine.kernels.embedding import InputTokens
from engine.kernels.quantised.int8 import (
    Int8,
    Int8Product,
    Int8Rows,
    gated_rows,
    product_of_rows,
    product_onto,
    quantise,
)
from engine.weights.parameters import Parameter, Shard, Weights

# Temporary bytes an element: its code, the packed code, and slices in float32.
_TEMPORARY_BYTES = 5
# Part of a model's fingerprint: another rounding needs another name.
ROUNDED = "rows of 8 bits, columns scaled"


@dataclass(slots=True)
class Int8Linear:
    """A product that also quantises its rows dynamically."""

    bias: torch.Tensor | None = None  # [N]
    _weight: Int8Product | None = None  # None until it is loaded

    def put(self, matrix: Int8) -> None:
        self._weight = Int8Product.of(matrix)

    @property
    def _loaded(self) -> Int8Product:
        assert self._weight is not None
        return self._weight

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return InInt8(self._loaded.columns)

    def __call__(self, x: torch.Tensor | Int8Rows, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return product_of_rows(self._rows(x), self._loaded, self.bias, out=out)

    def parts(self, x: torch.Tensor | Int8Rows) -> torch.Tensor:
        return self(x)

    def onto(self, residual: torch.Tensor, x: torch.Tensor | Int8Rows) -> torch.Tensor | None:
        product_onto(residual, self._rows(x), self._loaded, self.bias)
        return None

    def gated(self, x: torch.Tensor | Int8Rows, activation: str = "silu") -> torch.Tensor:
        return act_and_mul.reference(self(x), activation)

    def gated_as(self, form: InputForm, x: torch.Tensor | Int8Rows, activation: str = "silu") -> Rows:
        if isinstance(form, InInt8):  # without an intermediate float tensor
            return gated_rows(self._rows(x), self._loaded, self.bias, activation, form.columns)
        return form.of(self.gated(x, activation))

    def _rows(self, x: torch.Tensor | Int8Rows) -> Int8Rows:
        return x if isinstance(x, Int8Rows) else InInt8(self._loaded.columns).of(x)


@dataclass(slots=True)
class Int8Table:
    """Rows of codes. A head that shares them has a second copy, packed for GEMMs."""

    dtype: torch.dtype  # dtype of the returned features
    _rows: torch.Tensor  # this rank's
    _matrix: Int8 | None = None
    _head: Int8Linear | None = None

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._matrix = quantise(tensors["weight"]).part(self._rows, slice(None))
        if self._head is not None:
            self._head.put(self._matrix)

    def rows(self, tokens: InputTokens) -> torch.Tensor:
        assert self._matrix is not None
        return self._matrix.floats(tokens.ids(), self.dtype)

    def head(self, bias: torch.Tensor | None, weights: Weights) -> Linear:
        self._head = Int8Linear(bias)
        return self._head


@dataclass(frozen=True, slots=True)
class Int8WhileLoading:
    """Every product of a layer, and the head. Experts stay plain: each sees few rows."""

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
        linear = Int8Linear(declare_bias(spec, weights, under=under))
        weights.differing[ROUNDED] += 1

        rows, columns = weights.own(spec.parameter())

        def store(tensors: Mapping[str, torch.Tensor]) -> None:
            linear.put(quantise(tensors["weight"]).part(rows, columns))

        # Scales are those of the whole matrix, however many ranks share it.
        temporary = _TEMPORARY_BYTES * spec.size * spec.inputs
        weights.staged({"weight": replace(spec, shard=Shard.NONE).parameter()}, store, under=under, temporary=temporary)
        return linear

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.matrix(spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.experts(spec, weights, under=under)


@dataclass(frozen=True, slots=True)
class Int8Tables:
    """A table with a scale for each token and each feature."""

    def declare(self, parameter: Parameter, weights: Weights) -> Table:
        table = Int8Table(weights.dtype, weights.own(parameter)[0])
        whole = replace(parameter, shard=Shard.NONE)
        weights.staged({"weight": whole}, table.take, temporary=_TEMPORARY_BYTES * math.prod(parameter.shape))
        return table


INT8_WHILE_LOADING, INT8_TABLES = Int8WhileLoading(), Int8Tables()
