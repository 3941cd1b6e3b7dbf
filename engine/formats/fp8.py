"""Matrices in fp8 (e4m3) with scales for the tensor, for each row, or for blocks. N rows, K inputs.

Where no kernel multiplies them, they become plain while they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from engine.formats.dense import DENSE, Dense, rows_of_each, ways_of
from engine.formats.forms import PLAIN, InFp8, InputForm, Rows
from engine.formats.product import ExpertsSpec, KeptWhole, Linear, LinearSpec, declare_bias, kept_whole
from engine.formats.stored import (
    StoredPart,
    own_experts,
    places_by_module,
    plain_experts,
    plain_linear,
    plain_matrix,
    stage_parts,
    stage_rows,
)
from engine.kernels.experts.mixture import Matrices
from engine.kernels.quantised.fp8 import (
    FEW_ROWS,
    FP8,
    PARTS,
    Fp8Matrix,
    Fp8Rows,
    gated_product,
    gated_product_of_rows,
    multiplies_fp8,
    product,
    product_of_rows,
    product_parts,
    quantise_rows,
    rounded_gated_product,
    rounding_of,
)
from engine.weights.parameters import Placement, Shard, Weights
from engine.weights.stage import Store

_SCALE = ("weight_scale", "weight_scale_inv")  # both are multipliers
_UNUSED = ("input_scale", "activation_scale", "input_scale_ub")
INPUTS_MULTIPLE = 64
_ELEMENTS_AT_ONCE = 1 << 22  # expanded to float32, several times
_TEMPORARY_BYTES = 13 * _ELEMENTS_AT_ONCE  # while quantising
FEWEST_OUTPUTS = 64  # smaller matrices are not quantised


class Scales(Enum):
    """The granularity of scales."""

    TENSOR = auto()
    ROW = auto()
    BLOCK = auto()


@dataclass(slots=True)
class Fp8Linear:
    """A weight in fp8."""

    matrix: Fp8Matrix
    bias: torch.Tensor | None

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        """Quantised rows, except for small batches of float32."""
        is_kept = num_rows <= FEW_ROWS and dtype not in PARTS
        return PLAIN if is_kept else InFp8(rounding_of(self.matrix, num_rows, dtype))

    def __call__(self, x: torch.Tensor | Fp8Rows, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, Fp8Rows):
            return product_of_rows(x.values, x.scale, self.matrix, self.bias, x.dtype)
        return product(x, self.matrix, self.bias, out=out)

    def parts(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        if isinstance(x, Fp8Rows):
            return product_of_rows(x.values, x.scale, self.matrix, self.bias, x.dtype, partial=True)
        return product_parts(x, self.matrix, self.bias)

    def onto(self, residual: torch.Tensor, x: torch.Tensor | Fp8Rows) -> torch.Tensor | None:
        return self.parts(x)

    def gated(self, x: torch.Tensor | Fp8Rows, activation: str = "silu") -> torch.Tensor:
        if isinstance(x, Fp8Rows):
            return gated_product_of_rows(x.values, x.scale, self.matrix, self.bias, x.dtype, activation)
        return gated_product(x, self.matrix, self.bias, activation)

    def gated_as(self, form: InputForm, x: torch.Tensor | Fp8Rows, activation: str = "silu") -> Rows:
        if isinstance(x, Fp8Rows) and isinstance(form, InFp8):  # fused in one kernel
            scaled = x.values, x.scale, self.matrix, self.bias, x.dtype
            return rounded_gated_product(*scaled, form.rounding, activation)
        return form.of(self.gated(x, activation))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """`weight` in e4m3, and scales in floats: their product is the matrix.

    Scales of activations that the checkpoint may have are not used: each row of them gets its own.
    """

    scales: Scales
    block: tuple[int, int] = (128, 128)  # rows and inputs, of Scales.BLOCK

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        return {"weight": StoredPart((rows, inputs), FP8), "scale": self._scale(rows, inputs)}

    def unused(self) -> tuple[str, ...]:
        return _UNUSED

    def plain(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight, scale = tensors["weight"], tensors["scale"]
        if self._in_blocks:
            return Fp8Matrix(weight, scale, self.block).plain()
        return Fp8Matrix(weight, scale.expand(len(weight))).plain()

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
        inputs = weights.share(spec.parameter()).shape[1]
        if not self._suits(inputs, weights.device):
            return plain_linear(self, spec, weights, under=under)
        weight, places = weights.new(spec.parameter(dtype=FP8), under=under), places_by_module(spec, weights)
        for module in places:
            weights.unused.update(f"{under}{module}.{kind}" for kind in _UNUSED)
        declare = self._by_block if self._in_blocks else self._by_row
        matrix = declare(weight, places, spec, weights, under)
        return Fp8Linear(matrix, declare_bias(spec, weights, under=under))

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return plain_matrix(self, spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> Matrices:
        """Separate tensors of each expert; a scale for each row, or for each block if modules begin at blocks."""
        if not spec.each or spec.shard is not Shard.EXPERTS or not self._suits(spec.inputs, weights.device):
            return plain_experts(self, spec, weights, under=under)
        (each, *_), in_blocks = ways_of(spec), self._in_blocks
        weight = weights.new(replace(each.parameter, format=FP8), under=under)
        step = self.block[0] if spec.rows // len(spec.each) % self.block[0] == 0 else 1
        blocks = (-(-spec.rows // step), -(-spec.inputs // self.block[1]))
        own = own_experts(self, spec, weights, under=under)
        scale = weights.empty((len(own), *(blocks if in_blocks else (spec.rows,))), torch.float32)
        for index, expert in enumerate(own):
            for module, rows in rows_of_each(spec, expert):
                place = scale[index, _blocks(rows, step) if in_blocks else rows]

                def store(tensors: Mapping[str, torch.Tensor], place: torch.Tensor = place) -> None:
                    values = tensors["scale"]
                    if in_blocks and step == 1:
                        values = values.repeat_interleave(self.block[0], 0)[: len(place)]
                    place.copy_(values)

                weights.unused.update(f"{under}{module}.{kind}" for kind in _UNUSED)
                self._stage_scale(rows.stop - rows.start, spec.inputs, module, store, weights, under)
        return Fp8Matrix(weight, scale, (step, self.block[1]) if in_blocks else None)

    @property
    def _in_blocks(self) -> bool:
        return self.scales is Scales.BLOCK

    def _suits(self, inputs: int, device: torch.device) -> bool:
        """True if a kernel supports so many inputs: whole loop steps, and whole blocks."""
        size = self.block[1] if self._in_blocks else INPUTS_MULTIPLE
        return size % INPUTS_MULTIPLE == 0 and inputs % size == 0 and multiplies_fp8(device)

    def _scale(self, rows: int, inputs: int) -> StoredPart:
        blocks = (-(-rows // self.block[0]), -(-inputs // self.block[1]))
        shape = {Scales.TENSOR: (1,), Scales.ROW: (rows,), Scales.BLOCK: blocks}[self.scales]
        return StoredPart(shape, torch.float32, _SCALE)

    def _stage_scale(self, rows: int, inputs: int, module: str, store: Store, weights: Weights, under: str) -> None:
        """Declare the scales of a module; `store` may expand one for each row of a block."""
        temporary = (
            4 * self.block[0] * -(-rows // self.block[0]) * -(-inputs // self.block[1]) if self._in_blocks else 0
        )
        stage_parts({"scale": self._scale(rows, inputs)}, module, store, weights, under=under, temporary=temporary)

    def _by_row(
        self, weight: torch.Tensor, places: dict[str, list[Placement]], spec: LinearSpec, weights: Weights, under: str
    ) -> Fp8Matrix:
        """Declare row scales, also for tensor scales, which differ within a stack."""
        scale = weights.empty((len(weight),), torch.float32)
        for module, own in places.items():
            rows = own[0].stored_shape[0]

            def store(tensors: Mapping[str, torch.Tensor], rows: int = rows, own: list[Placement] = own) -> None:
                values = tensors["scale"].expand(rows)
                for place in own:
                    scale[place.target[0]].copy_(values[place.source[0]])

            self._stage_scale(rows, spec.inputs, module, store, weights, under)
        return Fp8Matrix(weight, scale)

    def _by_block(
        self, weight: torch.Tensor, places: dict[str, list[Placement]], spec: LinearSpec, weights: Weights, under: str
    ) -> Fp8Matrix:
        """Declare block scales, or one for each row of a block if modules of the stack begin within blocks."""
        rows, inputs = self.block
        begins = [_begin(end) for own in places.values() for place in own for end in (place.source[0], place.target[0])]
        step = rows if all(begin % rows == 0 for begin in begins) else 1
        scale = weights.empty((-(-len(weight) // step), -(-weight.shape[1] // inputs)), torch.float32)
        for module, own in places.items():

            def store(tensors: Mapping[str, torch.Tensor], own: list[Placement] = own) -> None:
                values = tensors["scale"] if step > 1 else tensors["scale"].repeat_interleave(rows, 0)
                for place in own:
                    columns = _blocks(place.source[1], inputs)
                    scale[_blocks(place.target[0], step)].copy_(values[_blocks(place.source[0], step), columns])

            self._stage_scale(own[0].stored_shape[0], spec.inputs, module, store, weights, under)
        return Fp8Matrix(weight, scale, (step, inputs))


def _begin(where: int | slice) -> int:
    assert isinstance(where, slice)
    return int(where.start)


def _blocks(where: int | slice, size: int) -> slice:
    """Block indices of rows or inputs."""
    assert isinstance(where, slice)
    return slice(where.start // size, -(-where.stop // size))


@dataclass(frozen=True, slots=True)
class Fp8WhileLoading:
    """Online fp8: plain matrices quantised to e4m3 with a scale for each row."""

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear | KeptWhole:
        """Without fp8 GEMMs the matrix is only rounded. Scales are of whole rows, however many ranks share the inputs."""
        shape = weights.share(spec.parameter()).shape
        if spec.size < FEWEST_OUTPUTS or spec.inputs % INPUTS_MULTIPLE:
            return DENSE.linear(spec, weights, under=under)
        if shape[1] % INPUTS_MULTIPLE:
            return kept_whole(self, spec, weights, under=under)
        columns, stored = weights.own(spec.parameter())[1], spec
        if spec.shard is Shard.INPUTS:
            stored = replace(spec, shard=Shard.NONE)
        bias = declare_bias(spec, weights, under=under)
        if multiplies_fp8(weights.device):
            matrix = Fp8Matrix(weights.empty(shape, FP8), weights.empty(shape[:1], torch.float32))
            take = _Rounded(matrix.weight, matrix.scale, columns)
            stage_rows(stored, take, weights, under=under, temporary=_TEMPORARY_BYTES)
            return Fp8Linear(matrix, bias)
        weights.made_plain[type(self).__name__] += 1
        dense = Dense(weights.empty(shape), bias)
        take = _Rounded(dense.weight, None, columns)
        stage_rows(stored, take, weights, under=under, temporary=_TEMPORARY_BYTES)
        weights.when_loaded.append(dense.pack)
        return dense

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.matrix(spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> Matrices:
        """Experts stay plain without fp8 kernels."""
        if spec.inputs % INPUTS_MULTIPLE or spec.shard is not Shard.EXPERTS:
            return DENSE.experts(spec, weights, under=under)
        if not multiplies_fp8(weights.device):
            weights.differing["experts left plain"] += spec.num_experts
            return DENSE.experts(spec, weights, under=under)
        shape = weights.share(spec.parameter()).shape
        values, scale = weights.empty(shape, FP8), weights.empty(shape[:2], torch.float32)
        take = _Rounded(values.flatten(0, 1), scale.flatten(), slice(None))

        def store(tensors: Mapping[str, torch.Tensor]) -> None:
            for expert, matrix in enumerate(tensors["weight"]):
                take(matrix, expert * shape[1])

        ways = {"weight": ways_of(spec)}
        weights.staged({"weight": spec.parameter()}, store, ways=ways, under=under, temporary=_TEMPORARY_BYTES)
        return Fp8Matrix(values, scale)


@dataclass(frozen=True, slots=True)
class _Rounded:
    """Quantises plain rows: to e4m3 with scales, or to the same values in 16 bits."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    columns: slice  # those that are kept

    def __call__(self, rows: torch.Tensor, begin: int) -> None:
        step = max(1, _ELEMENTS_AT_ONCE // rows.shape[1])
        for at in range(0, len(rows), step):
            self._round(rows[at : at + step], begin + at)

    def _round(self, rows: torch.Tensor, begin: int) -> None:
        place = slice(begin, begin + len(rows))
        # The reference version: our kernels are not launched while weights are loaded.
        found = quantise_rows.reference(rows)
        if self.scale is None:
            self.weight[place].copy_(Fp8Matrix(found.values, found.scale[:, 0]).plain()[:, self.columns])
        else:
            self.weight[place].copy_(found.values[:, self.columns])
            self.scale[place].copy_(found.scale[:, 0])


FP8_WHILE_LOADING = Fp8WhileLoading()
