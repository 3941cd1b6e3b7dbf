"""Experts in 4-bit floats with exponents for groups of 32 inputs, all in one tensor. E experts, N rows, K inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.formats.dense import DENSE
from engine.formats.product import ExpertsSpec, Linear, LinearSpec, Order
from engine.kernels.device import use_triton
from engine.kernels.quantised import repack, slabs
from engine.kernels.quantised.groups import Groups, allocate, pack, put
from engine.kernels.quantised.slabs import Slabs
from engine.weights.parameters import Weights, of_experts

GROUP = 32
# Temporary bytes an element of one expert: `TEMPORARY_BYTES`, plus 16 bits if it becomes plain.
_TEMPORARY_BYTES = 13


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """`_blocks` uint8 [E, N, K / 32, 16] and `_scales` uint8 [E, N, K / 32]; rows of gate and up are interleaved."""

    def linear(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
        return DENSE.linear(spec, weights, under=under)

    def matrix(self, spec: LinearSpec, weights: Weights, *, under: str) -> torch.Tensor:
        return DENSE.matrix(spec, weights, under=under)

    def experts(self, spec: ExpertsSpec, weights: Weights, *, under: str) -> Groups | Slabs:
        """Experts stay at 4 bits, in the device's layout."""
        (name,) = spec.together
        if spec.inputs % GROUP:
            raise ValueError(f"{under}{name}: mxfp4 needs a multiple of {GROUP} inputs, not {spec.inputs}")
        stored = (spec.num_experts, spec.rows, spec.inputs // GROUP)
        parameters = {
            kind: of_experts(f"{name}{kind}", *shape, format=torch.uint8)
            for kind, shape in (("_blocks", (*stored, GROUP // 2)), ("_scales", stored))
        }
        shape = weights.share(parameters["_scales"]).shape
        take = _Take(_memory((*shape[:2], spec.inputs), weights), spec.halves and spec.order is not Order.ROWS)
        temporary = _TEMPORARY_BYTES * spec.rows * spec.inputs
        weights.staged(parameters, take, under=under, temporary=temporary)
        return take.experts


MXFP4 = Mxfp4()


def _memory(shape: tuple[int, ...], weights: Weights) -> Groups | Slabs:
    if not use_triton(weights.empty((1,))):
        return slabs.allocate(shape)
    # bfloat16 holds every exponent.
    return allocate(shape, bits=4, group=GROUP, is_e2m1=True, device=weights.device, scales=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Take:
    """Packs the experts of a rank, one by one."""

    experts: Groups | Slabs
    alternate: bool  # rows of gate and up are interleaved

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        blocks, scales = tensors["_blocks"], tensors["_scales"]
        for expert in range(len(blocks)):
            codes = self._ordered(repack.from_pairs(blocks[expert].flatten(1)))
            factors = self._ordered(repack.from_exponents(scales[expert])).bfloat16()
            if isinstance(self.experts, Slabs):
                slabs.put(self.experts[expert], 0, codes, factors)
            else:
                put(self.experts[expert], 0, pack(codes, factors, bits=4, group=GROUP, is_e2m1=True))

    def _ordered(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[0::2], rows[1::2])) if self.alternate else rows
