"""Formats of groups: AWQ, GPTQ, compressed-tensors, bitsandbytes' rows, NVFP4. N rows, K inputs, G groups of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.formats.dense import DENSE
from engine.formats.groups import Grouping, declare_group_experts, declare_groups, plain
from engine.formats.product import ExpertsSpec, KeptWhole, Linear, LinearSpec
from engine.formats.stored import StoredPart, plain_matrix
from engine.kernels.quantised import repack
from engine.kernels.quantised.groups import Groups
from engine.kernels.quantised.repack import Unpacked
from engine.kernels.quantised.slabs import Slabs
from engine.kernels.quantised.tiles import Tiles
from engine.weights.parameters import Weights

Tensors = Mapping[str, torch.Tensor]


class Packed(Grouping, Protocol):
    """A format of groups whose words may span neighbouring rows."""

    @property
    def rows_of_words(self) -> int: ...


class _Common:
    """The common way from a format of groups to products."""

    group: int  # inputs; -1 or 0: all of a row
    has_levels = has_minimums = is_e2m1 = has_order = False

    @property
    def scales(self) -> torch.dtype:
        return torch.float32

    @property
    def rows_of_words(self) -> int:
        """Modules need a multiple of so many rows; others are stored plain, although no field says so."""
        return 1

    def group_of(self, inputs: int) -> int:
        return inputs if self.group <= 0 else self.group

    def unused(self) -> tuple[str, ...]:
        return ()

    def plain(self: Grouping, tensors: Tensors) -> torch.Tensor:
        return plain(self, tensors)

    def linear(self: Packed, spec: LinearSpec, weights: Weights, *, under: str) -> Linear | KeptWhole:
        if spec.size % self.rows_of_words:
            return DENSE.linear(spec, weights, under=under)
        if not spec.bias:  # some tools add zero biases
            weights.unused.update(f"{under}{spec.module(output)}.bias" for output in spec.outputs)
        return declare_groups(self, spec, weights, under=under)

    def matrix(self: Grouping, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return plain_matrix(self, spec, weights, under=under)

    def experts(
        self: Grouping, spec: ExpertsSpec, weights: Weights, *, under: str
    ) -> torch.Tensor | Groups | Slabs | Tiles:
        # Some tools add zero biases here, too.
        for expert in range(spec.num_experts):
            weights.unused.update(f"{under}{module.format(expert)}.bias" for module in spec.each)
        return declare_group_experts(self, spec, weights, under=under)


@dataclass(frozen=True, kw_only=True)
class Awq(_Common):
    """`qweight` [K, N / 8], `qzeros` [G, N / 8] and `scales` [G, N]."""

    group: int
    has_zeros: bool
    bits: int = 4

    @property
    def rows_of_words(self) -> int:
        return 8

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        num_groups = -(-inputs // self.group_of(inputs))
        parts = {
            "qweight": StoredPart((inputs, rows // 8), torch.int32),
            "scales": StoredPart((num_groups, rows), torch.float32),
        }
        if self.has_zeros:
            parts["qzeros"] = StoredPart((num_groups, rows // 8), torch.int32)
        return parts

    def unused(self) -> tuple[str, ...]:
        return () if self.has_zeros else ("qzeros",)

    def unpacked(self, tensors: Tensors) -> Unpacked:
        return repack.from_awq(tensors["qweight"], tensors.get("qzeros"), tensors["scales"])


@dataclass(frozen=True, kw_only=True)
class Gptq(_Common):
    """`qweight` [K * bits / 32, N], `qzeros` [G, N * bits / 32], `scales` [G, N] and `g_idx` [K], the group of each input."""

    stored_bits: int  # 2, 3, 4 or 8
    group: int  # -1: all inputs
    less_one: bool  # zero points are stored less 1
    has_order: bool  # g_idx permutes the inputs
    has_zeros: bool = True

    @property
    def bits(self) -> int:
        """Stored bits of a quantised value."""
        return max(4, self.stored_bits)

    @property
    def rows_of_words(self) -> int:
        return 32 // math.gcd(32, self.stored_bits)

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        num_groups = -(-inputs // self.group_of(inputs))
        parts = {
            "qweight": StoredPart((inputs * self.stored_bits // 32, rows), torch.int32),
            "qzeros": StoredPart((num_groups, rows * self.stored_bits // 32), torch.int32),
            "scales": StoredPart((num_groups, rows), torch.float32),
        }
        if self.has_order:
            parts["g_idx"] = StoredPart((inputs,), torch.int32)
        return parts

    def unused(self) -> tuple[str, ...]:
        return () if self.has_order else ("g_idx",)

    def unpacked(self, tensors: Tensors) -> Unpacked:
        found = repack.from_gptq(
            tensors["qweight"], tensors["qzeros"], tensors["scales"], bits=self.stored_bits, less_one=self.less_one
        )
        if not self.has_order or self.group == -1:
            return found
        return found.sorted(repack.by_group(tensors["g_idx"], self.group))


@dataclass(frozen=True, kw_only=True)
class PackedRows(_Common):
    """compressed-tensors: `weight_packed` [N, K * bits / 32], `weight_scale` [N, G], `weight_zero_point` [N * bits / 32, G]."""

    bits: int
    group: int  # -1: all inputs; 0: one scale for the whole matrix
    has_zeros: bool
    has_order: bool = False  # weight_g_idx is present

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        num_groups, words = -(-inputs // self.group_of(inputs)), -(-rows * self.bits // 32)
        parts = {
            "weight_packed": StoredPart((rows, -(-inputs * self.bits // 32)), torch.int32),
            "weight_scale": StoredPart((rows if self.group else 1, num_groups), torch.float32),
        }
        if self.has_zeros:
            parts["weight_zero_point"] = StoredPart((words, num_groups), torch.int32)
        if self.has_order:
            parts["weight_g_idx"] = StoredPart((inputs,), torch.int32)
        return parts

    def unused(self) -> tuple[str, ...]:
        maybe = ("weight_zero_point",) * (not self.has_zeros) + ("weight_g_idx",) * (not self.has_order)
        return ("weight_shape", "input_scale", *maybe)

    def unpacked(self, tensors: Tensors) -> Unpacked:
        packed, scales = tensors["weight_packed"], tensors["weight_scale"]
        inputs = packed.shape[1] * 32 // self.bits
        scales = scales.expand(packed.shape[0], scales.shape[1])
        found = repack.from_packed_rows(packed, tensors.get("weight_zero_point"), scales, bits=self.bits, inputs=inputs)
        return found.sorted(repack.by_group(tensors["weight_g_idx"], self.group)) if self.has_order else found


@dataclass(frozen=True, kw_only=True)
class SignedBytes(_Common):
    """`weight` int8 [N, K] and `weight_scale` [N, G]. Activations keep 16 bits, whatever the checkpoint asks for."""

    group: int  # -1: all inputs; 0: one scale for the whole matrix
    has_zeros: bool
    bits: int = 8

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        scales = (rows if self.group else 1, -(-inputs // self.group_of(inputs)))
        parts = {"weight": StoredPart((rows, inputs), torch.int8), "weight_scale": StoredPart(scales, torch.float32)}
        if self.has_zeros:
            parts["weight_zero_point"] = StoredPart(scales, torch.int8)
        return parts

    def unused(self) -> tuple[str, ...]:
        return ("input_scale", "input_zero_point") + ("weight_zero_point",) * (not self.has_zeros)

    def unpacked(self, tensors: Tensors) -> Unpacked:
        weight, zeros = tensors["weight"], tensors.get("weight_zero_point")
        scales = tensors["weight_scale"].expand(weight.shape[0], -1)
        return repack.from_signed(weight, None if zeros is None else zeros.expand(weight.shape[0], -1), scales)


@dataclass(frozen=True, kw_only=True)
class RowsOfBytes(_Common):
    """bitsandbytes: `weight` int8 [N, K] and `SCB` [N], each row's absolute maximum, represented by 127."""

    group: int = -1
    has_zeros: bool = False
    bits: int = 8

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        return {"weight": StoredPart((rows, inputs), torch.int8), "SCB": StoredPart((rows,), torch.float32)}

    def unused(self) -> tuple[str, ...]:
        return ("weight_format",)

    def unpacked(self, tensors: Tensors) -> Unpacked:
        return repack.from_signed(tensors["weight"], None, tensors["SCB"].view(-1, 1) / 127)


@dataclass(frozen=True, kw_only=True)
class Fp4(_Common):
    """4-bit floats, two in a byte, with a scale for each group and optionally one for the whole matrix."""

    is_e2m1 = True

    group: int
    codes: str = "weight_packed"  # uint8 [N, K / 2]
    scale: str = "weight_scale"  # [N, G]
    of_all: str = ""  # scale of the whole matrix
    divides: bool = False  # the scale divides
    is_exponent: bool = False  # scales are exponents of 2
    bits: int = 4
    has_zeros: bool = False

    @property
    def scales(self) -> torch.dtype:
        return torch.bfloat16 if self.is_exponent else torch.float32

    def tensors(self, rows: int, inputs: int) -> dict[str, StoredPart]:
        scale = torch.uint8 if self.is_exponent else torch.float8_e4m3fn
        parts = {
            self.codes: StoredPart((rows, inputs // 2), torch.uint8),
            self.scale: StoredPart((rows, inputs // self.group), scale),
        }
        if self.of_all:
            parts[self.of_all] = StoredPart((1,), torch.float32)
        return parts

    def unused(self) -> tuple[str, ...]:
        return ("input_scale", "input_global_scale")

    def unpacked(self, tensors: Tensors) -> Unpacked:
        stored = tensors[self.scale]
        scales = repack.from_exponents(stored) if self.is_exponent else stored.float()
        if self.of_all:
            whole = tensors[self.of_all]
            scales = scales / whole if self.divides else scales * whole
        return Unpacked(repack.from_pairs(tensors[self.codes]), scales, None)
